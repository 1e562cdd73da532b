"""The probe of the other targets, where TileLang answers as it was recorded to."""

from laya.tl_kernels import probe
from tests.kernels.kernel_checks import needs_tilelang


@needs_tilelang
def test_no_target_but_c_takes_a_program() -> None:
    assert {one.name: one.same for one in probe.targets()} == {"cpu": True, "llvm": True, "c": True}


@needs_tilelang
def test_every_kernel_fails_on_c_most_for_the_recorded_reason() -> None:
    attempts = {one.name: one for one in probe.kernels()}
    assert not any(one.found.startswith(("runs", "compiles")) for one in attempts.values())
    # rope_kernel stops at its fragments before its bf16 is looked at.
    assert {name for name, one in attempts.items() if not one.same} <= {"rope_kernel"}


@needs_tilelang
def test_c_accepts_what_it_was_recorded_to_and_computes_it_right() -> None:
    assert [one.name for one in probe.accepted() if not one.same or one.found == "runs, and is wrong"] == []
