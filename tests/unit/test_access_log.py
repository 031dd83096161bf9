"""Lines of the access log reach their file whole, wherever it is."""

import os
from pathlib import Path

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gateway.telemetry.log_file import LINE_BYTES, LogFile, _pieces, unwritable
from gateway.telemetry.record import Record, read_traceparent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@given(st.lists(st.binary(min_size=1, max_size=50), max_size=50), st.integers(50, 300))
def test_pieces_hold_whole_lines_and_nothing_is_lost_or_split(lines: list[bytes], most: int) -> None:
    pieces = list(_pieces(lines, most))
    assert b"".join(piece for _, piece in pieces) == b"".join(lines)
    left = list(lines)
    for count, piece in pieces:
        assert piece == b"".join(left[:count]) and len(piece) <= most
        left = left[count:]
    assert not left


def test_a_file_that_was_moved_away_is_followed_by_a_new_one_of_its_name(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    file = LogFile(str(path))
    assert file.write([b"one\n"]) == 0
    path.rename(tmp_path / "access.log.1")
    assert file.write([b"two\n"]) == 0
    path.unlink()
    assert file.write([b"three\n"]) == 0
    file.close()
    assert (tmp_path / "access.log.1").read_bytes() == b"one\n" and path.read_bytes() == b"three\n"


def test_what_is_truncated_is_written_to_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    file = LogFile(str(path))
    file.write([b"one\n"])
    os.truncate(path, 0)
    file.write([b"two\n"])
    file.close()
    assert path.read_bytes() == b"two\n"


def test_lines_that_cannot_be_written_are_counted_and_later_ones_are_when_they_can(tmp_path: Path) -> None:
    full = LogFile("/dev/full")
    assert full.write([b"one\n", b"two\n"]) == 2
    full.close()
    folder = tmp_path / "not yet there"
    file = LogFile(str(folder / "access.log"))
    assert file.write([b"one\n"]) == 1
    folder.mkdir()
    assert file.write([b"two\n"]) == 0
    file.close()
    assert (folder / "access.log").read_bytes() == b"two\n"
    assert unwritable(str(tmp_path)) == "is a directory"
    assert unwritable(str(folder / "access.log")) is None


def test_a_hostile_head_makes_no_line_that_is_too_long_to_be_written_whole() -> None:
    worst = '\x80"' * 8_000
    record = Record("r" * 128, "M" * 32, worst, {"user-agent": worst, "traceparent": worst}, "c" * 64)
    said = (record.request_id, record.method, record.path, record.user_agent, record.client)
    assert len(msgspec.json.encode(said)) < LINE_BYTES / 2
    assert record.trace_id == ""


def test_a_traceparent_is_read_as_w3c_has_it() -> None:
    assert Record("r", "GET", "/", {"traceparent": f"00-{TRACE}-{SPAN}-01"}, "").trace_id == TRACE
    assert read_traceparent(f"cc-{TRACE}-{SPAN}-01-what-will-be-added") is not None
    for bad in (
        *(
            f"ff-{TRACE}-{SPAN}-01",
            f"00-{'0' * 32}-{SPAN}-01",
            f"00-{TRACE}-{'0' * 16}-01",
            f"00-{TRACE.upper()}-{SPAN}-01",
        ),
        *("", f"00-{TRACE}-{SPAN}", f"00-{TRACE}-{SPAN}-01,00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-01 "),
    ):
        assert read_traceparent(bad) is None, bad
