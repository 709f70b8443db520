"""Records survive an interrupted write, for example by SIGKILL or a full disk."""

from pathlib import Path

import pytest

from betoken.bench.record_file import RecordFile, check_manifest, replace_file


@pytest.fixture
def cut_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Path.write_text

    def write_half(self: Path, text: str) -> int:
        whole(self, text[: len(text) // 2])
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", write_half)


@pytest.mark.usefixtures("cut_writes")
def test_a_file_that_is_replaced_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "left_out.json"
    path.write_bytes(b"[1]")
    with pytest.raises(OSError, match="no space"):
        replace_file(path, "[1, 2, 3]")
    assert path.read_text() == "[1]"


def test_a_manifest_cut_off_is_no_manifest(tmp_path: Path, cut_writes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="no space"):
        check_manifest(tmp_path / "manifest.json", {"num_prompts": 2})
    monkeypatch.undo()
    check_manifest(tmp_path / "manifest.json", {"num_prompts": 3})
    with pytest.raises(ValueError, match="num_prompts 3, this run has 2"):
        check_manifest(tmp_path / "manifest.json", {"num_prompts": 2})


@pytest.mark.usefixtures("cut_writes")
def test_a_line_cut_off_is_dropped_without_writing_the_others_again(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": 2}\n{"n"')
    RecordFile(path).append({"n": 3})
    assert RecordFile(path).read() == [{"n": 1}, {"n": 2}, {"n": 3}]
