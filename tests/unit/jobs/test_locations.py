"""A job says which file, and nothing about how it is reached: tried against a real server."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from jobs.discovery import find_files, identify
from jobs.errors import InputError, UnreadableInputError
from jobs.locations import check_root, open_input
from jobs.planning import plan_job
from schemas.job import JobSpec


@dataclass
class Store:
    """An object store that has nothing, and remembers what it was asked."""

    host: str
    asked: list[str] = field(default_factory=list)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            one.asked.append(self.path)
            self.send_response(404)
            self.end_headers()

        do_GET = do_HEAD  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    one = Store(f"127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield one
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_job_cannot_send_signed_requests_elsewhere(store: Store) -> None:
    root = "s3://bucket/data"
    name = f"{root}/x.parquet?endpoint_override={store.host}&scheme=http"
    for refuse in (
        lambda: find_files([name], [root]),
        lambda: find_files([name]),  # without roots, too
        lambda: check_root(name, [root]),
        lambda: open_input(name, [root]),
        lambda: identify(name, [root]),
        lambda: plan_job(JobSpec(inputs=[name], questions={"q": {}}, state=["text"]), 10, [root]),
    ):
        with pytest.raises(InputError, match="a job cannot set 'endpoint_override'"):
            refuse()
    assert store.asked == []


def test_the_root_says_where_its_files_are(store: Store) -> None:
    root = f"s3://bucket/data?endpoint_override={store.host}&scheme=http&region=us-east-1"
    for name in ("s3://bucket/data/x.parquet", "s3://bucket/data/x.parquet?region=eu-central-1"):
        check_root(name, [root])
        with pytest.raises(InputError, match="no such file"):
            identify(name, [root])
    assert store.asked
    assert store.asked[0] == "/bucket/data/x.parquet"
    with pytest.raises(InputError, match="not under an input root") as raised:
        check_root("s3://bucket/other/x.parquet", [root])
    assert store.host not in str(raised.value)


REFUSED = {
    "s3://key@bucket/data/x": "names a user",
    "s3://bucket/data/x?scheme=http": "cannot set 'scheme'",
    "s3://bucket/data/x?ENDPOINT_OVERRIDE=evil": "cannot set 'ENDPOINT_OVERRIDE'",
    "s3://bucket/data/x?region=evil.com/": "cannot set 'region'",
    "s3://bucket/data/x?region=": "cannot set 'region'",
    "s3://bucket/data/x?proxy_options=evil": "cannot set 'proxy_options'",
    "S3://bucket/data/x": "unknown kind of URL",
    "s3://bucket/data/%2e%2e/x": "not under|cannot hold",
    "s3://bucket/data/x#y": "without fragment",
    "s3://bucket\\@evil/data/x": "backslash",
    "s3://buc\tket/data/x": "control characters",
    "s3:///data/x": "names no bucket",
    "gs://token@bucket/x": "names a user",
    "gs://bucket/x?endpoint_override=evil": "cannot set 'endpoint_override'",
    "hdfs://host/x?user=root": "cannot set 'user'",
    "hdfs://host/x?kerb_ticket=/tmp/t": "cannot set 'kerb_ticket'",
    "abfs://c@a.dfs.core.windows.net/x?dfs_storage_authority=evil": "cannot set 'dfs_storage_authority'",
    "file://host/etc/passwd": "has no host",
    "mock:///x": "unknown kind of URL",
    "http://169.254.169.254/x": "unknown kind of URL",
}


@pytest.mark.parametrize(("name", "problem"), REFUSED.items())
def test_a_url_that_chooses_more_than_a_file_is_refused_at_submit_and_by_the_worker(name: str, problem: str) -> None:
    for refuse in (lambda: find_files([name]), lambda: open_input(name), lambda: check_root(name, [])):
        with pytest.raises(InputError, match=problem):
            refuse()


@pytest.mark.parametrize(
    ("name", "root"),
    [
        ("s3://bucket/data-2/x", "s3://bucket/data"),
        ("s3://bucket/DATA/x", "s3://bucket/data"),
        ("s3://bucket-2/data/x", "s3://bucket/data"),
        ("s3://bucket:9000/data/x", "s3://bucket/data"),
        ("s3://bucket/data/%2e%2e/x", "s3://bucket/data"),
        ("gs://bucket/data/x", "s3://bucket/data"),
        ("abfs://other@a.dfs.core.windows.net/x", "abfs://c@a.dfs.core.windows.net/"),
        ("abfs://c@evil.net/x", "abfs://c@a.dfs.core.windows.net/"),
        ("file:///data/x", "s3://bucket/data"),
        ("/data/x", "file:///data-2"),
        ("file:///data/%2e%2e/etc/x", "/data"),
    ],
)
def test_what_is_not_under_the_root_is_refused(name: str, root: str) -> None:
    with pytest.raises(InputError, match="not under an input root"):
        check_root(name, [root])


def test_files_found_behind_a_url_have_names_that_can_be_opened(tmp_path: Path) -> None:
    folder = tmp_path / "a b" / "city=S%C3%A3o"
    folder.mkdir(parents=True)
    for name in ("50%.parquet", "ü[1].parquet"):
        (folder / name).write_bytes(b"PAR1")
    found = find_files([f"file://{tmp_path}/a%20b"])
    assert [open_input(file.name)[1] for file in found] == sorted(str(file) for file in folder.iterdir())
    assert [identify(file.name) for file in found] == found
    assert find_files([f"file://{tmp_path}/a%20b/**/*%25.parquet"]) == found[:1]


def test_an_error_of_a_filesystem_is_one_line() -> None:
    try:
        open_input("hdfs://127.0.0.1:1/x")
    except UnreadableInputError as error:  # no Java here, or nobody who answers
        assert "\n" not in str(error)
        assert len(str(error)) < 400
