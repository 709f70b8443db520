"""Links between the pages lead to files and headings that exist; a happy round is told in twelve files."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    page
    for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")])
    if ".venv" not in page.parts
]
MOST_FILES_OF_A_ROUND = 12


def anchors(page: Path) -> set[str]:
    """Headings as GitHub makes anchors of them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def test_a_happy_round_is_told_in_few_files():
    page = (ROOT / "docs" / "architecture.md").read_text()
    told = page.partition("## Life of a request")[2].partition("\nBelow step")[0]
    steps = re.findall(r"^\| (\d) \w+ \|.*\]\(", told, re.M)
    assert steps == [str(number) for number in range(1, 9)]
    assert len(set(re.findall(r"\]\((\.\./[^)]+)\)", told))) <= MOST_FILES_OF_A_ROUND
