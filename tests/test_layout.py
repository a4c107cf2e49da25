"""Where tests are: beside nothing else than what they test, and each for itself."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
BRIDGE = TESTS.parent / "bridge"
FROM_TESTS = re.compile(r"^(?:from|import) tests\.(?:\w+\.)*test_", re.MULTILINE)
FILES = sorted(TESTS.rglob("test_*.py"))
# Of files that are no modules, or of several modules at once, some of them as processes.
ELSEWHERE = (
    "bench",
    "browser",
    "chart",
    "cluster",
    "faults",
    "image",
    "integration",
    "providers",
    "services",
    "soak",
)
NO_MODULE = {
    "http_server/test_malformed.py": "the parser and the connection against bytes of every kind",
    "http_server/test_uvicorn.py": "what another server does in its place",
    "inbound/test_signature_interop.py": "what services' own libraries sign",
    "test_changed.py": "a program for the tests",
    "test_compiled.py": "what is built of the modules",
    "test_docs.py": "the documents",
    "test_layout.py": "the tests",
    "test_main.py": "bridge/__main__.py",
    "test_makefile.py": "the Makefile",
    "test_reference.py": "a document",
    "test_site.py": "the documents",
    "test_sizes.py": "all modules",
}


def test_tests_mirror_the_modules() -> None:
    """A test of a module is found at the module's place; any other is listed above."""
    places = [file.relative_to(TESTS) for file in FILES]
    homeless = {
        str(place)
        for place in places
        if place.parts[0] not in ELSEWHERE
        and not (BRIDGE / place.with_name(place.name.removeprefix("test_"))).is_file()
    }

    assert homeless == NO_MODULE.keys()


def test_tests_share_nothing_but_what_is_made_for_it() -> None:
    """No file imports from a file of tests, but the one that collects tests once more."""
    importing = {
        str(file.relative_to(TESTS))
        for file in TESTS.rglob("*.py")
        if FROM_TESTS.search(file.read_text(encoding="utf-8"))
    }

    assert importing == {"integration/test_plain_wire.py"}
