"""How a window is divided where many questions are asked of each row."""

from pathlib import Path

import laya
from jobs.store.leases import RowError
from worker.routing import Part, Scorer
from worker.states import Window
from worker.windows import WINDOW_TOKENS, _divide_part


def test_many_questions_divide_a_window_and_few_do_not(tiny_checkpoint: Path) -> None:
    agent = laya.load(tiny_checkpoint, device="cpu")
    rows = list(range(2048))
    window = Window(rows, [None] * 2048, ["text"] * 2048, [RowError(9999, "*", None, "null_state", "m")], [None] * 2048)
    for questions in (1, 3, 400, 1000):
        prepared = agent.prepare({f"q{i}": {"type": "noul", "instructions": "x"} for i in range(questions)})
        pieces = list(_divide_part(Part(Scorer("c", agent, prepared), window, [None] * 2048)))
        assert [row for piece in pieces for row in piece.window.row_numbers] == rows
        assert [len(piece.window.errors) for piece in pieces] == [1] + [0] * (len(pieces) - 1)
        assert all(len(piece.routes) == len(piece.window.states) for piece in pieces)
        most = max(len(piece.window.states) for piece in pieces) * questions * agent.checkpoint.max_len
        assert most <= WINDOW_TOKENS
        assert (len(pieces) == 1) == (questions <= 3)


def test_a_window_of_errors_alone_is_one_piece(tiny_checkpoint: Path) -> None:
    agent = laya.load(tiny_checkpoint, device="cpu")
    window = Window([], [], [], [RowError(0, "*", None, "null_state", "m")], [])
    prepared = agent.prepare({"q": {"type": "noul", "instructions": "x"}})
    (piece,) = _divide_part(Part(Scorer("c", agent, prepared), window, []))
    assert piece.window == window
