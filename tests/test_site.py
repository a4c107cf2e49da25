"""The documentation site builds, is complete, and loads nothing from other hosts."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
BUILD_SECONDS = 120
# Attributes that make a browser load a resource, except links.
LOADING = {
    ("script", "src"),
    ("img", "src"),
    ("iframe", "src"),
    ("source", "src"),
    ("link", "href"),
    ("object", "data"),
}


class _Loads(HTMLParser):
    """Collects the resources of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses |= {value or "" for name, value in attrs if (tag, name) in LOADING}


def _build(*folders: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "docs/site.py", *map(str, folders)]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False
    )


@pytest.fixture(scope="module")
def built(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Build the site of the repository with one link to nowhere in its README."""
    folder = tmp_path_factory.mktemp("site")
    repository = tmp_path_factory.mktemp("repository")
    for path in ROOT.iterdir():
        (repository / path.name).symlink_to(path)
    readme = repository / "README.md"
    text = readme.read_text(encoding="utf-8")
    readme.unlink()
    readme.write_text(f"{text}\n[x](docs/reference.md#no-such)\n", encoding="utf-8")
    return folder, _build(folder, repository)


@pytest.fixture
def site(built: tuple[Path, object]) -> Path:
    """Lend the folder with the site, which is there even if a link is wrong."""
    return built[0]


def test_each_page_is_on_the_site(site: Path) -> None:
    """Every document has a page at its path in the repository."""
    pages = {path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*.md")}
    built = {page.with_suffix(".html") for page in pages}
    indexes = {page.with_name("index.html") if page.stem == "README" else page for page in built}

    assert len(pages) > 20
    assert {page for page in indexes if not (site / page).is_file()} == set()


def test_steps_are_numbered_on(site: Path) -> None:
    """Blocks within a list item are indented by four spaces; with fewer the site ends the list."""
    fenced = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
    shallow = {
        f"{path.relative_to(ROOT)}: {line}"
        for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
        for line in fenced.sub("", path.read_text(encoding="utf-8")).splitlines()
        if re.match(r" {1,3}\S", line)
    }
    page = (site / "docs/deployment.html").read_text(encoding="utf-8")

    assert shallow == set()
    assert page.count("<ol>") == 1


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    foreign: set[str] = set()
    missing: set[str] = set()
    for page in pages:
        loads = _Loads()
        loads.feed(page.read_text(encoding="utf-8"))
        assert loads.addresses
        for address in loads.addresses:
            if "//" in address:
                foreign.add(address)
            elif page.name != "404.html" and not _file(page, address).is_file():
                missing.add(f"{page.relative_to(site)}: {address}")
    styles = [
        path.read_text(encoding="utf-8")
        for kind in ("css", "svg")
        for path in site.rglob(f"*.{kind}")
    ]

    assert len(pages) > 20
    assert (foreign, missing) == (set(), set())
    assert not any("url(http" in style or "url(//" in style for style in styles)


def _file(page: Path, address: str) -> Path:
    return page.parent / address.partition("#")[0].partition("?")[0]


def test_the_search_knows_the_pages(site: Path) -> None:
    """The search works without a server."""
    index = (site / "search" / "search_index.json").read_text(encoding="utf-8")

    assert "docs/reference.html" in index
    assert "sms-bridge-expires-at" in index


def test_a_link_to_nowhere_ends_the_build(
    built: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    """A link to a missing heading is an error that names it, and the pages have no other."""
    _, done = built
    warnings = [line for line in done.stderr.splitlines() if line.startswith("WARNING")]

    assert done.returncode == 1
    assert len(warnings) == 1, done.stderr
    assert "#no-such" in warnings[0]
