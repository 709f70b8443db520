from pathlib import Path

import pytest

from betoken.training.corpus import Document, load_corpus, read_documents, split


def write_tree(root: Path, num_files: int, folder: str = "lib") -> None:
    (root / folder).mkdir(parents=True, exist_ok=True)
    for index in range(num_files):
        (root / folder / f"m{index:03}.py").write_text(f"value = {index}\n")


def test_held_out_files_are_disjoint_from_training_files_and_together_they_are_all(tmp_path: Path) -> None:
    write_tree(tmp_path, 60)
    corpus = load_corpus(tmp_path)
    training, held_out = ({document.path for document in part} for part in (corpus.training, corpus.held_out))
    assert training.isdisjoint(held_out)
    assert training | held_out == {document.path for document in read_documents(tmp_path)}
    assert held_out == {"lib/m007.py", "lib/m032.py", "lib/m057.py"}


def test_files_under_test_are_never_held_out() -> None:
    corpus = split([Document(f"test/t{index}.py", "pass\n") for index in range(50)])
    assert corpus.held_out == () and len(corpus.training) == 50


def test_documents_come_in_path_order_without_site_packages_empty_and_broken_files(tmp_path: Path) -> None:
    write_tree(tmp_path, 3)
    write_tree(tmp_path, 3, "site-packages")
    (tmp_path / "lib" / "broken.py").write_bytes(b"x = '\xff'\n")
    (tmp_path / "lib" / "__init__.py").write_text("\n")
    (tmp_path / "a.py").write_bytes(b"x = 1\r\n")
    documents = read_documents(tmp_path)
    assert [document.path for document in documents] == ["a.py", "lib/m000.py", "lib/m001.py", "lib/m002.py"]
    assert documents[0].text == "x = 1\n"


def test_fingerprint_sees_every_text_and_the_split(tmp_path: Path) -> None:
    write_tree(tmp_path, 30)
    before = load_corpus(tmp_path).fingerprint()
    assert load_corpus(tmp_path).fingerprint() == before
    (tmp_path / "lib" / "m003.py").write_text("value = 4\n")
    assert load_corpus(tmp_path).fingerprint() != before


def test_a_folder_with_too_few_files_is_refused(tmp_path: Path) -> None:
    write_tree(tmp_path, 2)
    with pytest.raises(ValueError, match="too few"):
        load_corpus(tmp_path)
