"""What README and docs show is true: code runs, commands parse, links lead somewhere, every error has its entry."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import pkgutil
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvtier
from kvtier import errors
from kvtier.cli.main import main

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "integrations" / "README.md"]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
PACKAGES = sorted(x.parent for x in (ROOT / "kvtier").rglob("__init__.py"))
FENCE = re.compile(r"^```(?P<kind>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
#: A line of a package's docstring that says what files, or what folder, are for, from its names on.
LISTED = re.compile(r"^(?=\w+(?:\.py|/)(?:,|\s))(?P<line>.*)$", re.MULTILINE)
#: What is in kvtier, by its whole name.
DOTTED = re.compile(r"\bkvtier(?:\.\w+)+")
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")


def blocks(page: Path, kind: str) -> Iterator[tuple[int, str, str]]:
    """Line, the heading above, and text of each fenced block of a language."""
    text = page.read_text("utf-8")
    for found in FENCE.finditer(text):
        if found["kind"] == kind:
            headings = re.findall(r"^##? (.*)$", text[: found.start()], re.MULTILINE)
            yield text.count("\n", 0, found.start()) + 2, headings[-1], found["text"]


def missing(code: ast.AST) -> list[str]:
    """Packages that a block imports and that are not here."""
    modules = [n.module for n in ast.walk(code) if isinstance(n, ast.ImportFrom) and n.module]
    modules += [alias.name for n in ast.walk(code) if isinstance(n, ast.Import) for alias in n.names]
    return sorted({m for m in (m.split(".")[0] for m in modules) if importlib.util.find_spec(m) is None})


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A folder with the examples in it, and the names that fragments use."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVTIER_PROFILE", str(tmp_path / "profiles"))  # for those that calibrate
    model = AutoModelForCausalLM.from_pretrained("examples/pylm").eval()
    inputs = AutoTokenizer.from_pretrained("examples/pylm")("def first(items):\n" * 20, return_tensors="pt")
    return {"kvtier": kvtier, "torch": torch, "TieredKVCache": kvtier.TieredKVCache, "model": model, "inputs": inputs}


@pytest.mark.parametrize("page", [p for p in PAGES if any(blocks(p, "python"))], ids=named)
def test_every_python_block_runs(page: Path, prepared: dict[str, Any]) -> None:
    # Blocks of a page go on from one another. Those of troubleshooting are fragments, each of which ends in its error.
    whole = page.name != "troubleshooting.md"
    namespace: dict[str, Any] = {"__name__": "page"}
    for line, heading, text in blocks(page, "python"):
        code = ast.parse(text)
        if missing(code):  # an optional package: it has to be Python, no more
            continue
        ast.increment_lineno(code, line - 1)
        run = compile(code, str(page), "exec")
        if whole:
            exec(run, namespace)
        else:
            with pytest.raises(getattr(kvtier, heading)):
                exec(run, dict(prepared))
            kvtier.disable(prepared["model"])


class Parsed(Exception):
    """A command line that the parser took."""


@pytest.mark.parametrize("page", [p for p in PAGES if any(blocks(p, "console"))], ids=named)
def test_every_command_parses(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parsed(self: argparse.ArgumentParser, *args: Any) -> argparse.Namespace:
        parse(self, *args)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    for _, _, text in blocks(page, "console"):
        for command in (x.removeprefix("$ ") for x in text.splitlines() if x.startswith("$ kvtier ")):
            with pytest.raises(Parsed):
                main(shlex.split(command, comments=True)[1:])


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_link_leads_to_a_file(page: Path) -> None:
    for found in LINK.finditer(FENCE.sub("", page.read_text("utf-8"))):
        target = found["target"].split("#")[0]
        if target and "://" not in target:
            found_there = page.parent / target
            assert found_there.exists(), f"{page.name}: {target}"
            # The site that `make docs` builds has nothing else.
            is_on_site = page.is_relative_to(ROOT / "docs")
            assert not is_on_site or found_there.resolve().is_relative_to(ROOT / "docs"), f"{page.name}: {target}"


def absent(text: str) -> list[str]:
    """What it names in kvtier that is not there."""
    found = []
    for name in sorted(set(DOTTED.findall(text))):
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            found.append(name)
    return found


@pytest.mark.parametrize("page", [ROOT / "CHANGELOG.md", *PAGES], ids=named)
def test_every_dotted_name_is_there(page: Path) -> None:
    assert absent(page.read_text("utf-8")) == []


def test_a_dotted_name_that_is_not_there_is_noticed() -> None:
    text = "`kvtier.planning.reports.log.Logged`, kvtier.tiered, `kvtier.planning.log` and kvtier.errors.NoError."
    assert absent(text) == ["kvtier.errors.NoError", "kvtier.planning.log"]


def listed(package: Path) -> set[str]:
    """The files and the folders, with a slash, that a package's docstring lists."""
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text("utf-8"))) or ""
    return {
        x for found in LISTED.finditer(text) for x in re.findall(r"(?<![\w/.])\w+(?:\.py|/)(?![\w*])", found["line"])
    }


def parts(package: Path) -> set[str]:
    """The files of a package, and the packages in it, with a slash."""
    files = {x.name for x in package.glob("*.py") if x.stem not in ("__init__", "__main__")}
    return files | {f"{x.parent.name}/" for x in package.glob("*/__init__.py")}


@pytest.mark.parametrize("package", [x for x in PACKAGES if listed(x)], ids=named)
def test_a_package_that_lists_its_files_lists_all_of_them(package: Path) -> None:
    names = listed(package)
    assert parts(package) <= names, "a file that the docstring leaves out"
    assert all((package / x).exists() for x in names), "the docstring has a file that is not there"


def test_a_file_that_no_list_has_is_noticed(tmp_path: Path) -> None:
    text = "What there is.\n\na.py  one, see c.py\nb.py, d/  two\n\nAs examples/e.py and f.py.\n"
    (tmp_path / "__init__.py").write_text(f'"""{text}"""')
    (tmp_path / "g.py").touch()
    assert listed(tmp_path) == {"a.py", "b.py", "c.py", "d/"}
    assert parts(tmp_path) - listed(tmp_path) == {"g.py"}


def test_every_error_has_its_entry() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
    entries = {m[1]: m[2] for m in re.finditer(r"^## (\w+Error)\n(.*?)(?=^## )", text, re.MULTILINE | re.DOTALL)}
    known = {n: e for n, e in vars(errors).items() if isinstance(e, type) and issubclass(e, errors.KVTierError)}
    del known["KVTierError"]
    assert list(entries) == list(known), "each error once, in the order of kvtier/errors.py"
    for name, entry in entries.items():
        assert f"**{known[name].__bases__[1].__name__}.**" in entry
        assert "- **Cause:**" in entry
        assert "- **Remedy:**" in entry


def test_every_public_name_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "reference.md").read_text("utf-8")
    shown = set(re.findall(r"^::: kvtier\.(\w+)$", text, re.MULTILINE))
    of_errors = {name for name in kvtier.__all__ if hasattr(errors, name)}
    assert shown - {"errors"} == set(kvtier.__all__) - of_errors


def test_the_cache_is_always_given_the_config() -> None:
    for page in PAGES:
        if "decisions" not in page.parts and "design" not in page.parts:
            assert "TieredKVCache()" not in page.read_text("utf-8"), page.name
