"""Builds the documentation site: `make docs`, or python docs/site.py FOLDER [REPOSITORY].

The pages of the repository also link to files outside `docs`. Linked files are copied to the same
relative path, and mkdocs checks every link and heading.
"""

import logging
import shutil
import sys
import tempfile
from pathlib import Path

from mkdocs.commands.build import build
from mkdocs.config import load_config

ROOT = Path(__file__).parents[1]
FILES = (
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"),
    *("config.example.yaml", "compose.yaml"),
    "helm/sms-bridge/README.md",
)
FOLDERS = ("docs", "examples", "helm/sms-bridge/files")
# Their tables need the room of the table of contents.
WIDE_PAGES = ("docs/metrics.md", "docs/log-events.md")
# Not copied: programs that make the documents, and build results of the examples (.gitignore).
NOT_COPIED = shutil.ignore_patterns(
    *("site.py", "*picture*.py", "__pycache__"),
    *("node_modules", "package-lock.json", "bin", "obj", "lib", "vendor", "composer.lock"),
)


def gather(repository: Path, folder: Path) -> None:
    """Copy the pages and the linked files."""
    for name in FOLDERS:
        shutil.copytree(repository / name, folder / name, ignore=NOT_COPIED)
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(repository / name, folder / name)
    for name in WIDE_PAGES:
        text = (folder / name).read_text()
        (folder / name).write_text(f"---\nhide: [toc]\n---\n{text}")


def main(site: str, repository: str = str(ROOT)) -> None:
    """Build the site. Fails if a link's target or heading is missing."""
    # Show mkdocs' warnings, which are errors here.
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        gather(Path(repository), Path(folder))
        config = load_config(
            str(Path(repository) / "mkdocs.yml"),
            docs_dir=folder,
            site_dir=str(Path(site).absolute()),
            strict=True,
        )
        build(config)


if __name__ == "__main__":
    main(*sys.argv[1:])
