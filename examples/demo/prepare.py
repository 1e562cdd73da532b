"""Turns the three source files into the demo's rows: masked, labelled, without repeats, split by the text itself.

    python examples/demo/prepare.py SOURCE_DIR

SOURCE_DIR holds sms.parquet (id, text, label), reviews.parquet (id, text, sentiment) and support_chat.parquet (id,
text, lang, category). Writes data/train.parquet, data/validation.parquet and held_out.parquet beside this script.
train.py opens held_out.parquet only to measure the finished checkpoint.
"""

import argparse
import hashlib
import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

HERE = Path(__file__).parent
HELD_OUT_PERCENT, VALIDATION_PERCENT = 20, 10
# A rating of -4 to +4 becomes a level: the number of these bounds it exceeds.
LEVEL_BOUNDS = (-2.0, -0.5, 0.5, 2.0)
TOPICS = {
    "facts": ("trivia", "science", "history"),
    "feelings": ("emotion", "psychology"),
    "machines": ("ai", "botprofile", "computers"),
    "coding": ("coding",),
    "small_talk": ("conversations", "greetings", "gossip"),
    "books_films": ("literature", "movies"),
    "sports": ("sports",),
    "money": ("money",),
}
TOPIC_OF = {category: topic for topic, categories in TOPICS.items() for category in categories}
SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("is_spam", pa.bool_()),
        pa.field("rating", pa.float32()),
        pa.field("sentiment", pa.int8()),
        pa.field("topic", pa.string()),
    ]
)
NUMBER = re.compile(r"\d(?:[ ().-]{0,2}\d){5,}")
CONTROL = re.compile(r"[\x80-\x9f]")
MAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
Row = dict[str, Any]


def mask_contacts(text: str) -> str:
    """Six digits or more in a row, spaced or not, become zeros; a mail address becomes name@example.com."""
    zeroed = NUMBER.sub(lambda match: re.sub(r"\d", "0", match.group()), text)
    return MAIL.sub("name@example.com", zeroed)


def repair(text: str) -> str:
    """HTML entities become characters; so do the Windows-1252 bytes that were read as control characters."""
    text = html.unescape(text)
    return CONTROL.sub(lambda match: match.group().encode("latin-1").decode("cp1252", "ignore"), text).strip()


def normalise(text: str) -> str:
    """What two copies of one message share: letters and digits only, every digit a 0, no case."""
    return re.sub(r"\d", "0", re.sub(r"[\W_]+", " ", text.casefold())).strip()


def read_rows(source_dir: Path) -> Iterator[Row]:
    for row in pq.read_table(source_dir / "sms.parquet").to_pylist():
        text = mask_contacts(repair(row["text"]))
        yield {"id": row["id"], "text": text, "source": "sms", "is_spam": row["label"] == "spam"}
    for row in pq.read_table(source_dir / "reviews.parquet").to_pylist():
        level = sum(row["sentiment"] > bound for bound in LEVEL_BOUNDS)
        labels = {"rating": row["sentiment"], "sentiment": level}
        yield {"id": row["id"], "text": row["text"], "source": "review", **labels}
    for row in pq.read_table(source_dir / "support_chat.parquet").to_pylist():
        if row["lang"] == "en" and row["category"] in TOPIC_OF:
            yield {"id": row["id"], "text": row["text"], "source": "chat", "topic": TOPIC_OF[row["category"]]}


def drop_repeats(rows: Iterator[Row]) -> list[Row]:
    """The first row of every normalised text, over all three sources: no text can then straddle the split."""
    first: dict[str, Row] = {}
    for row in rows:
        key = normalise(row["text"])
        if key:
            first.setdefault(key, row)
    return list(first.values())


def name_split(text: str) -> str:
    bucket = int(hashlib.sha256(normalise(text).encode()).hexdigest(), 16) % 100
    if bucket < HELD_OUT_PERCENT:
        return "held_out"
    return "validation" if bucket < HELD_OUT_PERCENT + VALIDATION_PERCENT else "train"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source_dir", type=Path)
    source_dir = parser.parse_args().source_dir
    rows = drop_repeats(read_rows(source_dir))
    # Order by a digest of the id, so that every part of the held-out file mixes the three sources.
    rows.sort(key=lambda row: hashlib.sha256(row["id"].encode()).digest())
    (HERE / "data").mkdir(exist_ok=True)
    for split, folder in (("train", HERE / "data"), ("validation", HERE / "data"), ("held_out", HERE)):
        part = [row for row in rows if name_split(row["text"]) == split]
        path = folder / f"{split}.parquet"
        table = pa.Table.from_pylist(part, schema=SCHEMA)
        pq.write_table(table, path, compression="zstd", compression_level=19, row_group_size=1000)
        print(f"{path.name}: {len(part):,} rows, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
