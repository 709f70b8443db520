"""Links between the pages lead to files and headings that exist; the table of a round links to few files."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    page
    for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")])
    if ".venv" not in page.parts
]
MAX_LINKED_FILES = 12


def anchors(page: Path) -> set[str]:
    """Headings as GitHub makes anchors of them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_docs_lead_to_files_and_headings(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def test_the_table_of_a_round_has_eight_steps_and_links_to_few_files():
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.partition("## Life of a request")[2].partition("\nStep 6 uses")[0]
    steps = re.findall(r"^\| (\d) \w+ \|.*\]\(", section, re.M)
    assert steps == [str(number) for number in range(1, 9)]
    assert len(set(re.findall(r"\]\((\.\./[^)]+)\)", section))) <= MAX_LINKED_FILES
