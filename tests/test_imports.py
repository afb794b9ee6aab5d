"""Imports: they run one way, have no effect, and examples use public names only.

The rules read the source of whatever modules exist, so a new module is under them from its first line.
Each rule is also shown a small tree that breaks it: a rule that cannot fail says nothing.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvtier

ROOT = Path(__file__).resolve().parent.parent

ARCHITECTURE = ROOT / "docs" / "architecture.md"


def drawn_rows(said: str) -> tuple[set[str], ...]:
    """An order as docs/architecture.md draws it behind these words: rows between dots, what may be imported first."""
    text = " ".join(ARCHITECTURE.read_text(encoding="utf-8").split())
    found = re.search(rf"{said}: ([^.]*)\.", text)
    assert found, "docs/architecture.md does not say how imports run"
    return tuple(
        {part for words in re.findall(r"`([^`]+)`", row) for part in words.split()} for row in found[1].split("·")
    )


# A part may import the parts of rows before it here, and beside it those that do not import it in turn.
# A new part must be given its place in the picture.
ROWS = drawn_rows("imports what stands before it in this list, and never what stands behind it")
ROWS_OF_CONVERSATION = drawn_rows("Inside `conversation`, likewise")
ROWS_OF_DISK = drawn_rows("Inside `conversation/disk`, likewise")
ROWS_OF_HF = drawn_rows("Inside `hf`, likewise")


def row_by_part(rows: tuple[set[str], ...]) -> dict[str, int]:
    """Which row each part is in."""
    return {part: row for row, parts in enumerate(rows) for part in parts}


# The folders of `memory` likewise, one in a row; its modules come after them.
MEMORY = [folder for row in drawn_rows("those of `memory/` run so") for folder in row]

# Deciding needs numbers and a clock: these never import what moves bytes.
PURE = {"errors", "config", "stats", "profile", "planning", "eviction", "scheduling"}
BARRED_FROM_PURE = (
    "torch",
    "transformers",
    *(f"kvtier.{x}" for x in ("memory", "transfer", "tables", "forward", "hf")),
)


# --------------------------------------------------------------------------------- reading imports


def package_files(root: Path) -> list[Path]:
    return sorted((root / "kvtier").rglob("*.py"))


def part_of(root: Path, file: Path) -> str:
    """`kvtier/hf/cache/cache.py` -> `hf`, `kvtier/stats.py` -> `stats`, `kvtier/__init__.py` -> ``."""
    first = file.relative_to(root / "kvtier").parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


@functools.cache  # every rule looks at the same files
def imported(root: Path, file: Path) -> tuple[tuple[int, str], ...]:
    """Line and full dotted name of everything that a file imports, inside functions and for types too.

    `from a import b` gives `a.b`, for b may be a module; relative imports are made absolute.
    """
    return tuple(_imported(root, file))


def _imported(root: Path, file: Path) -> Iterator[tuple[int, str]]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = file.relative_to(root).parent.parts
                base = ".".join([*here[: len(here) - node.level + 1], *([base] if base else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "import_module":
            yield from ((node.lineno, a.value) for a in node.args if isinstance(a, ast.Constant))


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def importers(root: Path, package: str) -> list[str]:
    """Files of kvtier that import a package."""
    files = (f for f in package_files(root) if any(within(n, package) for _, n in imported(root, f)))
    return [f.relative_to(root).as_posix() for f in files]


# --------------------------------------------------------------------------------------- the rules
# Each takes the root of a tree and returns what breaks the rule.


def transformers_is_imported_in_hf_only(root: Path) -> list[str]:
    others = [f for f in package_files(root) if not f.relative_to(root).as_posix().startswith("kvtier/hf/")]
    return [
        f.relative_to(root).as_posix()
        for f in others
        for _, name in imported(root, f)
        if within(name, "transformers") and not _is_the_server(f.relative_to(root).as_posix(), name)
    ]


def _is_the_server(file: str, name: str) -> bool:
    return file.startswith("kvtier/serving/http/") and within(name, "transformers.cli.serving")


def the_server_is_imported_when_it_is_started(root: Path) -> list[str]:
    packages = ("fastapi", "starlette", "uvicorn", "openai")
    files = {f for package in packages for f in importers(root, package)}
    inside = {f for f in importers(root, "kvtier.serving.http") if f != "kvtier/cli/serve.py"}
    return sorted(f for f in files | inside if not f.startswith("kvtier/serving/http/"))


def triton_is_imported_in_one_kernel_module(root: Path) -> list[str]:
    files = importers(root, "triton")
    return files[1:] + [f for f in files[:1] if not f.startswith("kvtier/kernels/")]


def safetensors_is_imported_in_one_module(root: Path) -> list[str]:
    return importers(root, "safetensors")[1:]


def what_decides_imports_nothing_that_moves_bytes(root: Path) -> list[str]:
    return [
        f"{f.relative_to(root)}:{line} imports {name}"
        for f in package_files(root)
        if part_of(root, f) in PURE
        for line, name in imported(root, f)
        if any(within(name, barred) for barred in BARRED_FROM_PURE)
    ]


def imports_run_one_way(root: Path) -> list[str]:
    return _against_the_order(root, "kvtier", ROWS)


def what_is_in_conversation_imports_each_other_one_way(root: Path) -> list[str]:
    return _against_the_order(root, "kvtier.conversation", ROWS_OF_CONVERSATION) + _against_the_order(
        root, "kvtier.conversation.disk", ROWS_OF_DISK
    )


def folders_of_hf_import_each_other_one_way(root: Path) -> list[str]:
    return _against_the_order(root, "kvtier.hf", ROWS_OF_HF)


def _against_the_order(root: Path, package: str, rows: tuple[set[str], ...]) -> list[str]:
    broken = []
    places: dict[tuple[str, str], str] = {}  # (part, part it imports) -> where
    order, level, home = row_by_part(rows), len(package.split(".")), root.joinpath(*package.split("."))
    for file in package_files(root):
        if home not in file.parents or file == home / "__init__.py":
            continue  # kvtier/__init__.py gathers the public names
        part = file.relative_to(home).parts[0].removesuffix(".py")
        if part not in order:
            broken.append(f"{file.relative_to(root)}: give {part!r} its place in {ARCHITECTURE.name}")
            continue
        for line, name in imported(root, file):
            target = ".".join(name.split(".")[level : level + 1])
            if within(name, package) and target != part:
                places[part, target] = f"{file.relative_to(root)}:{line} ({part}) imports {name}"
    for (part, target), place in places.items():
        row = order.get(target, len(rows))
        if row > order[part] or (row == order[part] and (target, part) in places):
            broken.append(place)
    return broken


def what_is_in_a_folder_imports_each_other_one_way(root: Path) -> list[str]:
    """Its modules, and its folders with all that is in them."""
    files = {".".join(f.relative_to(root).with_suffix("").parts): f for f in package_files(root)}
    graph: dict[str, set[str]] = {}
    for module, file in files.items():
        names = {name for _, name in imported(root, file)}
        for other in files:
            if other != module and any(within(name, other) for name in names):
                here, there = where_they_part(module, other)
                if here != there:
                    graph.setdefault(here, set()).add(there)
    broken: list[str] = []
    done: set[str] = set()

    def follow(module: str, path: list[str]) -> None:
        if module in path:
            broken.append(" -> ".join([*path[path.index(module) :], module]))
        elif module not in done:
            for other in sorted(graph.get(module, ())):
                follow(other, [*path, module])
            done.add(module)

    for module in list(graph):
        follow(module, [])
    return broken


def where_they_part(one: str, other: str) -> tuple[str, str]:
    """Two names, up to the first part in which they differ: the neighbours in one folder that have them."""
    a, b = one.split("."), other.split(".")
    count = next((i for i, (x, y) in enumerate(zip(a, b, strict=False), 1) if x != y), 0)
    return ".".join(a[:count]), ".".join(b[:count])


def folders_of_memory_import_in_the_drawn_order(root: Path) -> list[str]:
    """Each those before it, and none of the modules that put them together."""
    broken = []
    for file in package_files(root):
        here = file.relative_to(root / "kvtier").parts
        if here[0] != "memory":
            continue
        row = MEMORY.index(here[1]) if here[1] in MEMORY else len(MEMORY)
        for line, name in imported(root, file):
            there = name.split(".")[2:]
            if within(name, "kvtier.memory") and there and there[0] != here[1]:
                target = MEMORY.index(there[0]) if there[0] in MEMORY else len(MEMORY)
                if target > row:
                    broken.append(f"{file.relative_to(root)}:{line} imports {name}")
    return broken


def only_commands_import_calibration(root: Path) -> list[str]:
    files = importers(root, "kvtier.calibration")
    allowed = ("kvtier/calibration/", "kvtier/cli/", "kvtier/__init__.py")
    return [f for f in files if not f.startswith(allowed)]


def only_calibration_writes_the_profile(root: Path) -> list[str]:
    return [
        f"{file.relative_to(root)}:{node.lineno}"
        for file in package_files(root)
        if part_of(root, file) not in ("calibration", "profile")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute | ast.ImportFrom)
        and (ast.unparse(node).endswith("profile.store") or ast.unparse(node) == "from kvtier.profile import store")
    ]


def guests_use_public_names_only(root: Path) -> list[str]:
    public = {*kvtier.__all__, "__version__"}
    broken = []
    for file in sorted(f for folder in ("integrations", "examples") for f in (root / folder).rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        names = [(line, name) for line, name in imported(root, file) if within(name, "kvtier")]
        names += [
            (node.lineno, ast.unparse(node))
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "kvtier"
        ]
        broken += [
            f"{file.relative_to(root)}:{line} uses {name}"
            for line, name in names
            if name != "kvtier" and not within(name, "kvtier.testing") and name.removeprefix("kvtier.") not in public
        ]
    return broken


Rule = Callable[[Path], list[str]]

# Each rule beside trees that break it, as {path: source}.
RULES: list[tuple[Rule, list[dict[str, str]]]] = [
    (
        transformers_is_imported_in_hf_only,
        [
            {"kvtier/forward/forward.py": "from transformers.cache_utils import DynamicCache"},
            {"kvtier/memory/storage/pool.py": "def f():\n    import transformers as t"},
            {"kvtier/__init__.py": "import importlib\nimportlib.import_module('transformers')"},
            {"kvtier/serving/engine.py": "from transformers.cli.serving import utils"},
            {"kvtier/serving/http/app.py": "from transformers import DynamicCache"},
        ],
    ),
    (
        the_server_is_imported_when_it_is_started,
        [
            {"kvtier/serving/engine.py": "import fastapi"},
            {"kvtier/cli/chat.py": "def f():\n    import openai"},
            {"kvtier/serving/__init__.py": "from kvtier.serving.http.server import Server"},
        ],
    ),
    (
        triton_is_imported_in_one_kernel_module,
        [
            {"kvtier/attention/split.py": "import triton"},
            {"kvtier/kernels/a.py": "import triton", "kvtier/kernels/b.py": "import triton.language as tl"},
        ],
    ),
    (
        safetensors_is_imported_in_one_module,
        [{"kvtier/a.py": "import safetensors", "kvtier/b.py": "from safetensors.torch import load"}],
    ),
    (
        what_decides_imports_nothing_that_moves_bytes,
        [
            {"kvtier/planning/cost.py": "import torch"},
            {"kvtier/planning/cost.py": "from kvtier import memory"},
            {"kvtier/planning/deep/cost.py": "from ...memory.pool import BlockPool"},
            {"kvtier/config.py": "def f():\n    from torch import cuda"},
            {"kvtier/stats.py": "import kvtier.hf.cache.cache"},
        ],
    ),
    (
        imports_run_one_way,
        [
            {"kvtier/memory/storage/pool.py": "from kvtier.tables.table import BlockTable"},
            {"kvtier/memory/storage/pool.py": "from ...hf import cache"},
            {"kvtier/tables/layer.py": "if TYPE_CHECKING:\n    from kvtier.attention.reader import LayerReader"},
            {"kvtier/kernels/dense.py": "from kvtier.memory.storage.pool import BlockPool"},
            {"kvtier/planning/policy.py": "from kvtier.memory.blocks.block import BlockSet"},
            {"kvtier/forward/forward.py": "from kvtier import TieredKVCache"},
            {"kvtier/forward/forward.py": "import kvtier"},
            {"kvtier/hf/cache/cache.py": "from kvtier.testing import HeldTransfers"},
            {"kvtier/config.py": "import kvtier.stats", "kvtier/stats.py": "import kvtier.config"},
            {"kvtier/newcomer.py": ""},
        ],
    ),
    (
        folders_of_hf_import_each_other_one_way,
        [
            {"kvtier/hf/models/layers.py": "from kvtier.hf.cache.layer import TieredLayer"},
            {"kvtier/hf/attention/view.py": "def f():\n    from ..cache import cache"},
            {"kvtier/hf/callers/caller.py": "import kvtier.hf"},
            {
                "kvtier/hf/engine/packed.py": "from kvtier.hf.wrapper import tiering",
                "kvtier/hf/wrapper/tiering.py": "import kvtier.hf.engine.sampling",
            },
            {"kvtier/hf/newcomer.py": ""},
        ],
    ),
    (
        what_is_in_conversation_imports_each_other_one_way,
        [
            {"kvtier/conversation/kept/kept.py": "from kvtier.conversation.calls.call import Call"},
            {"kvtier/conversation/disk/files/files.py": "from kvtier.conversation.disk.rows.manifest import Row"},
            {"kvtier/conversation/disk/rows/manifest.py": "def f():\n    from ..kept import kept"},
            {"kvtier/conversation/journal.py": "from kvtier.conversation import store"},
            {"kvtier/conversation/calls/call.py": "import kvtier.conversation"},
            {
                "kvtier/conversation/states.py": "from kvtier.conversation import journal",
                "kvtier/conversation/journal.py": "from kvtier.conversation.states import States",
            },
            {"kvtier/conversation/newcomer.py": ""},
        ],
    ),
    (
        what_is_in_a_folder_imports_each_other_one_way,
        [
            {
                "kvtier/a/b/x.py": "from kvtier.a.c import y",
                "kvtier/a/c/y.py": "",
                "kvtier/a/c/z.py": "import kvtier.a.b.x",
            },
            {"kvtier/a/b/x.py": "from kvtier.a import y", "kvtier/a/y.py": "from kvtier.a.b.x import z"},
            {"kvtier/a/x.py": "from kvtier.a import y", "kvtier/a/y.py": "def f():\n    from kvtier.a.x import z"},
            {
                "kvtier/a/x.py": "from . import y",
                "kvtier/a/y.py": "from .z import b",
                "kvtier/a/z.py": "from .x import c",
            },
            {
                "kvtier/a/x.py": "if TYPE_CHECKING:\n    from . import y",
                "kvtier/a/y.py": "import kvtier.a.x",
            },
        ],
    ),
    (
        folders_of_memory_import_in_the_drawn_order,
        [
            {"kvtier/memory/storage/pool.py": "from kvtier.memory.blocks.block import Run"},
            {"kvtier/memory/access/change.py": "from kvtier.memory.tiers import host"},
            {"kvtier/memory/blocks/block.py": "from kvtier.memory import usage"},
            {"kvtier/memory/tiers/device.py": "from kvtier.memory.owner import Owner"},
        ],
    ),
    (
        only_commands_import_calibration,
        [
            {"kvtier/forward/forward.py": "from kvtier.calibration.run import calibrate"},
            {"kvtier/hf/cache/cache.py": "def f():\n    import kvtier.calibration.measurements.tiles"},
        ],
    ),
    (
        only_calibration_writes_the_profile,
        [
            {"kvtier/kernels/tiles.py": "from kvtier import profile\nprofile.store('m', 'n', 1)"},
            {"kvtier/transfer/launches.py": "from kvtier.profile import store"},
        ],
    ),
    (
        guests_use_public_names_only,
        [
            {"examples/demo.py": "from kvtier.memory.storage.pool import BlockPool"},
            {"examples/demo.py": "from kvtier.errors import BudgetError"},
            {"examples/deep/demo.py": "from kvtier import forward"},
            {"integrations/a.py": "import kvtier\nkvtier.forward.Forward()"},
            {"integrations/a.py": "import kvtier.hf.cache.cache"},
        ],
    ),
]


@pytest.mark.parametrize("rule", [rule for rule, _ in RULES], ids=lambda rule: rule.__name__)
def test_the_tree_keeps_the_rule(rule: Rule) -> None:
    assert (ROOT / "kvtier" / "__init__.py").is_file()
    broken = rule(ROOT)
    assert not broken, "\n".join(["", *broken])


@pytest.mark.parametrize(
    ("rule", "files"),
    [pytest.param(rule, files, id=f"{rule.__name__}-{i}") for rule, trees in RULES for i, files in enumerate(trees)],
)
def test_the_rule_notices_a_tree_that_breaks_it(rule: Rule, files: dict[str, str], tmp_path: Path) -> None:
    for path, source in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(source)
    assert rule(tmp_path)


def parts_in(folder: Path) -> set[str]:
    """Its modules and folders, by name."""
    return {file.relative_to(folder).parts[0].removesuffix(".py") for file in folder.rglob("*.py")} - {"__init__"}


def test_the_picture_has_every_part_once_and_no_other() -> None:
    parts = {part_of(ROOT, file) for file in package_files(ROOT)} - {""}
    conversation, hf = ROOT / "kvtier" / "conversation", ROOT / "kvtier" / "hf"
    for rows, found in (
        (ROWS, parts),
        (ROWS_OF_HF, parts_in(hf)),
        (ROWS_OF_CONVERSATION, parts_in(conversation)),
        (ROWS_OF_DISK, parts_in(conversation / "disk")),
    ):
        assert set(row_by_part(rows)) == found
        assert sum(map(len, rows)) == len(row_by_part(rows))
    assert [row for row in ROWS if "hf" in row] == [{"hf"}]


def test_the_picture_has_every_folder_of_memory() -> None:
    folders = {path.name for path in (ROOT / "kvtier" / "memory").iterdir() if (path / "__init__.py").is_file()}
    assert sorted(MEMORY) == sorted(folders)


def test_the_files_that_the_architecture_names_exist() -> None:
    text = ARCHITECTURE.read_text(encoding="utf-8")
    folders = sorted({path.name for path in (ROOT / "kvtier").iterdir() if path.is_dir()})
    named = set(re.findall(rf"(?<![\w/])(?:{'|'.join(folders)})/[\w/.]+\.py", text))
    assert len(named) > 20
    assert [name for name in sorted(named) if not (ROOT / "kvtier" / name).is_file()] == []


# ------------------------------------------------------------------------------------ public names


def test_no_two_modules_of_tests_have_one_name() -> None:
    """Where both are collected, pytest would refuse the second one."""
    names = [x.name for x in (ROOT / "tests").rglob("*.py") if x.name not in ("conftest.py", "__init__.py")]
    assert len(names) == len(set(names)), sorted(x for x in set(names) if names.count(x) > 1)


def test_public_names_are_sorted_and_unique() -> None:
    assert kvtier.__all__
    assert list(kvtier.__all__) == sorted(set(kvtier.__all__))


def test_what_is_loaded_lazily_is_what_is_public() -> None:
    assert list(kvtier._HOME) == list(kvtier.__all__)
    assert {"disable", "enable", "register_attention"} <= set(kvtier.__all__)


def test_a_name_that_is_not_public_is_an_error_to_a_type_checker() -> None:
    # One that sees a `__getattr__` of the module takes every name, and a misspelt one is an object.
    tree = ast.parse(Path(kvtier.__file__).read_text("utf-8"))
    hidden = [x for x in tree.body if isinstance(x, ast.If) and ast.unparse(x.test) == "not TYPE_CHECKING"]
    inside = {node for x in hidden for node in ast.walk(x)}
    defined = [x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef) and x.name == "__getattr__"]
    assert defined
    assert inside.issuperset(defined)
    seen = [x for x in tree.body if isinstance(x, ast.If) and ast.unparse(x.test) == "TYPE_CHECKING"]
    names = [a.name for x in seen for n in ast.walk(x) if isinstance(n, ast.ImportFrom) for a in n.names]
    assert sorted(names) == sorted(kvtier.__all__)


@pytest.mark.parametrize("name", kvtier.__all__)
def test_a_public_name_resolves_and_is_documented(name: str) -> None:
    value = getattr(kvtier, name)
    assert name in dir(kvtier)
    if callable(value):
        assert (value.__doc__ or "").strip()


def test_a_completion_offers_what_is_public_and_nothing_else() -> None:
    assert dir(kvtier) == sorted([*kvtier.__all__, "__version__"])


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        kvtier.no_such_name  # noqa: B018


# ---------------------------------------------------------------------------------- importing acts
# In a process of its own: imports kvtier, then every public name, and prints what that changed.

PROBE = """
import os, sys, threading
from pathlib import Path

import torch
import transformers
from transformers import cache_utils, masking_utils, modeling_utils
from transformers.generation import utils as generation_utils
import torch.nn.functional

WATCHED = [torch, torch.Tensor, torch.nn.functional, torch.nn.Module, torch.cuda, torch.overrides,
           cache_utils, masking_utils, modeling_utils, generation_utils, sys, threading]
REGISTRIES = [modeling_utils.ALL_ATTENTION_FUNCTIONS, masking_utils.ALL_MASK_ATTENTION_FUNCTIONS]
torch.zeros(8) + 1  # whatever torch does at its first operation is done

def attributes():
    '''Every watched attribute, and those of the classes among them, by their full names.'''
    found = {}
    for owner in WATCHED:
        for name, value in list(vars(owner).items()):
            found[owner.__name__, name] = value
            if isinstance(value, type):
                owned = list(vars(value).items())
                found.update({(value.__module__, value.__qualname__, n): v for n, v in owned})
    return found

def is_code(value):
    return callable(value) or isinstance(value, (classmethod, staticmethod, property))

def state():
    '''What an import must leave alone, as sets of names.'''
    task = Path("/proc/self/task")
    return {
        "registered": {(type(r).__name__, name) for r in REGISTRIES for name in r.keys()},
        "threads": {t.name for t in task.iterdir()} if task.exists() else set(threading.enumerate()),
        "files": {p.as_posix() for p in Path.cwd().rglob("*")},
        "environment": set(os.environ.items()),
        "CUDA": {torch.cuda.is_initialized()},
    }

MUST_NOT = {"subprocess.Popen", "os.system", "os.posix_spawn", "os.fork", "os.exec", "socket.connect"}
events, watching = [], False
sys.addaudithook(lambda event, args: events.append(event) if watching and event in MUST_NOT else None)

old, before = attributes(), state()
watching = True
import kvtier
for name in kvtier.__all__:
    getattr(kvtier, name)
watching = False
new, after = attributes(), state()

for key, value in new.items():
    inherited_until_now = len(key) == 3 and key not in old
    if is_code(value) and (inherited_until_now or old.get(key, value) is not value):
        print("patched:", ".".join(key))
for what in before:
    if before[what] != after[what]:
        print(f"{what}:", sorted(map(str, before[what] ^ after[what])))
if events:
    print("did:", events)
print("probed:", len(old))
"""


def run_probe(tmp_path: Path, code: str, path: Path = ROOT) -> str:
    """What a fresh interpreter prints; its working folder and home are an empty folder."""
    env = {**os.environ, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_kvtier_and_its_names_has_no_effect(tmp_path: Path) -> None:
    output = run_probe(tmp_path, PROBE).splitlines()
    assert output[:-1] == []
    assert int(output[-1].split()[1]) > 1000


GUILTY = """
import os, subprocess, threading, time
import torch.nn.functional, transformers.cache_utils, transformers.modeling_utils
__all__ = []
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
transformers.cache_utils.DynamicCache.update = lambda *args: None
torch.nn.functional.scaled_dot_product_attention = lambda *args: None
transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.register("guilty", lambda *args: None)
open("cache.bin", "w").close()
os.environ["KVTIER_GUILTY"] = "1"
subprocess.run(["true"])
"""


def test_the_probe_notices_every_effect(tmp_path: Path) -> None:
    guilty, home = tmp_path / "path", tmp_path / "home"
    (guilty / "kvtier").mkdir(parents=True)
    home.mkdir()
    (guilty / "kvtier" / "__init__.py").write_text(GUILTY)
    found = [line.split(" ") for line in run_probe(home, PROBE, guilty).splitlines()]
    assert [what for what, *_ in found] == [
        *("patched:", "patched:", "registered:", "threads:", "files:", "environment:", "did:", "probed:")
    ]
    assert {name for what, name, *_ in found if what == "patched:"} == {
        "torch.nn.functional.scaled_dot_product_attention",
        "transformers.cache_utils.DynamicCache.update",
    }


def test_importing_kvtier_alone_loads_neither_torch_nor_transformers(tmp_path: Path) -> None:
    heavy = ("torch", "transformers", "accelerate", "triton", "safetensors")
    code = f"import sys, kvtier; print([m for m in {heavy} if m in sys.modules])"
    assert run_probe(tmp_path, code) == "[]\n"


@pytest.mark.parametrize("part", sorted(PURE & {part_of(ROOT, f) for f in package_files(ROOT)}))
def test_what_decides_loads_without_torch(part: str, tmp_path: Path) -> None:
    code = f"import sys, kvtier.{part}; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    assert run_probe(tmp_path, code) == "[]\n"
