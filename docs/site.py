"""Build the documents as a site: `make docs`, or python docs/site.py FOLDER [REPOSITORY].

The pages are those of the repository, which link to each other and to files outside of `docs`, so
that they can be read on a forge as well. What they link to is copied beside them, at the same
place, and mkdocs.yml has every link and heading checked.
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
# Programs that make the documents, and what the examples are built of (.gitignore).
NOT_COPIED = shutil.ignore_patterns(
    *("site.py", "*picture*.py", "__pycache__"),
    *("node_modules", "package-lock.json", "bin", "obj", "lib", "vendor", "composer.lock"),
)


def gather(repository: Path, folder: Path) -> None:
    """Copy the pages, and what they link to, each to its place."""
    for name in FOLDERS:
        shutil.copytree(repository / name, folder / name, ignore=NOT_COPIED)
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(repository / name, folder / name)


def main(site: str, repository: str = str(ROOT)) -> None:
    """Build; ends with an error when a link or a heading that one leads to is not there."""
    # Without this its warnings, each of which is an error here, would not be seen.
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
