"""The file with the load progress of a service."""

from pathlib import Path

from betoken.rpc.early_end import undone_at_end
from betoken.rpc.progress import LoadProgress


def test_the_progress_file_of_an_interrupted_start_is_not_written_again(tmp_path: Path) -> None:
    with undone_at_end():
        progress = LoadProgress(tmp_path / "ready")
        progress("loading weights", 0.5)
        assert [path.name for path in tmp_path.iterdir()] == ["ready.progress"]
    progress("packing weights", 0.6)  # by the thread that still loads
    assert list(tmp_path.iterdir()) == []
    assert progress.error.stage == "packing weights"
