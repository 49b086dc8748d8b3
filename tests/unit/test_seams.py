"""The seam engine on fake hosts: what is hooked, when, what is told, and that nothing stays behind."""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megacp.errors import SeamError
from megacp.hosts import rows as rows_module
from megacp.hosts.rows import entry_point_rows, load_rows
from megacp.hosts.seams import Seam, Seams, SeamState

Write = Callable[[str, str], None]
Make = Callable[..., Seams]

HOST = """
    import functools

    def forward(q, k=0):
        return ("forward", q, k)

    @functools.lru_cache(maxsize=8)
    def table(n):
        return ["table", n]

    class Base:
        def inherited(self, x):
            return ("inherited", x)

    class Attention(Base):
        def forward(self, q, k=0):
            return ("method", q, k)

        @staticmethod
        def scale(x):
            return ("static", x)

        @classmethod
        def build(cls, x):
            return (cls.__name__, x)

        @functools.lru_cache(maxsize=8)
        def cached(self, x):
            return ["cached", x]
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write modules of a fake host into a folder of the import path; all of them are forgotten afterwards."""
    before = set(sys.modules)
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))

    def write(name: str, text: str) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        importlib.invalidate_caches()

    yield write
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in {"host", "other", "script", "nspace", "rival"}:
            del sys.modules[name]


@pytest.fixture
def host(write: Write) -> None:
    write("host/__init__.py", "")
    write("host/core.py", HOST)


@pytest.fixture
def make() -> Iterator[Make]:
    """Make tables that are uninstalled at the end, whatever happens."""
    made: list[Seams] = []

    def make(*rows: Seam) -> Seams:
        made.append(Seams(rows))
        return made[-1]

    yield make
    for seams in reversed(made):
        seams.uninstall()


def marked(original: Callable[..., Any]) -> Callable[..., Any]:
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return ("hooked", original(*args, **kwargs))

    return replacement


def seam(target: str | Sequence[str] = "host.core:forward", name: str = "attention", **more: Any) -> Seam:
    return Seam(name, target, **{"wrap": marked, **more})  # type: ignore[arg-type]


def load(name: str) -> Any:
    return importlib.import_module(name)


def only(seams: Seams) -> SeamState:
    (state,) = seams.report()
    return state


# -- when


def test_a_module_imported_after_install_is_hooked_right_after_its_body(host: None, make: Make) -> None:
    seams = make(seam())
    seams.install()
    assert only(seams).status == "waiting"
    assert load("host.core").forward(1) == ("hooked", ("forward", 1, 0))
    assert only(seams).status == "hooked"
    assert only(seams).targets == ("host.core:forward",)


def test_a_by_value_import_after_install_gets_the_wrapper(host: None, write: Write, make: Make) -> None:
    write("script.py", "from host.core import forward\nresult = forward(2)\n")
    make(seam()).install()
    assert load("script").result == ("hooked", ("forward", 2, 0))


def test_a_copy_taken_while_the_body_was_still_running_is_rebound(write: Write, make: Make) -> None:
    write("host/__init__.py", "")
    write("host/core.py", "def forward(q):\n    return q\n\nimport host.user\n")
    write("host/user.py", "from host.core import forward\n")
    seams = make(seam())
    seams.install()
    assert load("host.core").forward is load("host.user").forward
    assert load("host.user").forward(1) == ("hooked", 1)
    assert only(seams).rebound == ("host.user.forward",)


def test_a_late_install_rebinds_copies_by_identity_and_says_so(host: None, write: Write, make: Make) -> None:
    write("host/user.py", "from host.core import forward as run\n")
    write("script.py", "from host.core import forward\n")
    user, script, core = load("host.user"), load("script"), load("host.core")
    original = core.forward
    seams = make(seam())
    seams.install()
    assert user.run is script.forward is core.forward is not original
    assert sorted(only(seams).rebound) == ["host.user.run", "script.forward"]
    seams.uninstall()
    assert user.run is script.forward is core.forward is original


def test_copies_in_the_main_module_are_rebound(
    host: None, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = ModuleType("__main__")
    vars(main)["forward"] = load("host.core").forward
    monkeypatch.setitem(sys.modules, "__main__", main)
    seams = make(seam())
    seams.install()
    assert vars(main)["forward"](1)[0] == "hooked"
    assert only(seams).rebound == ("__main__.forward",)


def test_a_module_that_is_being_imported_during_install_is_hooked_at_the_next_look(
    write: Write, make: Make
) -> None:
    seams = make(seam())
    sys.modules["other_hook"] = hook = ModuleType("other_hook")
    vars(hook)["install"] = seams.install
    try:
        write("host/__init__.py", "")
        write("host/core.py", "import other_hook\nother_hook.install()\ndef forward(q):\n    return q\n")
        core = load("host.core")
        assert only(seams).status == "waiting"
        seams.check()
        assert core.forward(1) == ("hooked", 1)
    finally:
        del sys.modules["other_hook"]


def test_a_reloaded_module_is_hooked_again_and_restored_to_the_new_original(host: None, make: Make) -> None:
    seams = make(seam(), seam("host.core:Attention.forward", "method"))
    seams.install()
    core = load("host.core")
    old = core.Attention()
    importlib.reload(core)
    assert core.forward(1) == ("hooked", ("forward", 1, 0))
    assert core.Attention().forward(1) == ("hooked", ("method", 1, 0))
    assert [state.status for state in seams.report()] == ["hooked", "hooked"]
    assert seams.uninstall() == []
    assert core.forward(1) == ("forward", 1, 0)
    assert core.Attention().forward(1) == old.forward(1) == ("method", 1, 0)


def test_many_threads_importing_at_once_all_see_the_wrapper(host: None, make: Make) -> None:
    seams = make(seam(), seam("host.core:Attention.forward", "method"))
    seams.install()
    start = threading.Barrier(8)
    seen: list[Any] = []

    def take() -> None:
        start.wait()
        seen.append(load("host.core").forward(1))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert seen == [("hooked", ("forward", 1, 0))] * 8


# -- what


def test_methods_are_patched_in_place_on_the_class(host: None, make: Make) -> None:
    core = load("host.core")
    attention = core.Attention()
    before = dict(vars(core.Attention))
    seams = make(seam("host.core:Attention.forward"))
    seams.install()
    assert attention.forward(1, k=2) == ("hooked", ("method", 1, 2))
    seams.uninstall()
    assert dict(vars(core.Attention)) == before


def test_static_and_class_methods_stay_what_they_are(host: None, make: Make) -> None:
    core = load("host.core")
    before = dict(vars(core.Attention))
    seams = make(seam("host.core:Attention.scale", "scale"), seam("host.core:Attention.build", "build"))
    seams.install()
    sub = type("Sub", (core.Attention,), {})
    assert core.Attention.scale(1) == core.Attention().scale(1) == ("hooked", ("static", 1))
    assert sub.build(1) == sub().build(1) == ("hooked", ("Sub", 1))
    assert isinstance(vars(core.Attention)["scale"], staticmethod)
    assert isinstance(vars(core.Attention)["build"], classmethod)
    seams.uninstall()
    assert dict(vars(core.Attention)) == before


def test_an_inherited_method_is_hooked_on_the_named_class_only(host: None, make: Make) -> None:
    core = load("host.core")
    seams = make(seam("host.core:Attention.inherited"))
    seams.install()
    assert core.Attention().inherited(1) == ("hooked", ("inherited", 1))
    assert core.Base().inherited(1) == ("inherited", 1)
    seams.uninstall()
    assert "inherited" not in vars(core.Attention)
    assert core.Attention().inherited(1) == ("inherited", 1)


def test_lru_cached_functions_still_cache_and_can_be_cleared(host: None, make: Make) -> None:
    core = load("host.core")
    seams = make(seam("host.core:table", "table"), seam("host.core:Attention.cached", "cached"))
    seams.install()
    assert core.table(3) == ("hooked", ["table", 3])
    assert core.table(3)[1] is core.table(3)[1]
    assert core.table.cache_info().hits == 2
    core.table.cache_clear()
    assert core.table.cache_info().currsize == 0
    one = core.Attention()
    assert one.cached(1)[1] is one.cached(1)[1]
    one.cached.cache_clear()
    assert one.cached.cache_info().currsize == 0
    seams.uninstall()
    assert type(core.table).__name__ == "_lru_cache_wrapper"


def test_the_wrapper_looks_like_the_original_and_names_its_seam(host: None, make: Make) -> None:
    core = load("host.core")
    original = core.forward
    make(seam()).install()
    assert core.forward.__megacp_seam__ == "attention"
    assert core.forward.__wrapped__ is original
    assert (core.forward.__name__, core.forward.__module__) == ("forward", "host.core")


def test_of_several_targets_the_first_one_that_exists_is_hooked(host: None, make: Make) -> None:
    core = load("host.core")
    seams = make(seam(["host.old:forward", "host.core:forward", "host.core:Attention.forward"]))
    seams.install()
    assert only(seams).targets == ("host.core:forward",)
    assert core.Attention().forward(1) == ("method", 1, 0)


def test_every_target_is_hooked_once_even_if_it_is_exported_again(
    host: None, write: Write, make: Make
) -> None:
    write("host/again.py", "from host.core import forward\n")
    targets = ["host.again:forward", "host.core:forward", "host.core:Attention.forward"]
    seams = make(seam(targets, every=True))
    seams.install()
    again, core = load("host.again"), load("host.core")
    assert again.forward(1) == core.forward(1) == ("hooked", ("forward", 1, 0))
    assert core.Attention().forward(1) == ("hooked", ("method", 1, 0))
    seams.uninstall()
    assert again.forward(1) == core.forward(1) == ("forward", 1, 0)


def test_two_seams_on_one_target_nest_and_come_apart(host: None, write: Write, make: Make) -> None:
    write("host/user.py", "from host.core import forward\n")
    user, core = load("host.user"), load("host.core")
    original = core.forward
    seams = make(seam(), seam(name="second", wrap=lambda f: lambda *a, **k: ("second", f(*a, **k))))
    seams.install()
    assert core.forward(1) == user.forward(1) == ("second", ("hooked", ("forward", 1, 0)))
    assert [state.notes for state in seams.report()] == [(), ()]
    assert seams.uninstall() == []
    assert core.forward is user.forward is original


def test_a_wrapper_sees_its_own_parameter_names_in_a_fork_that_renamed_them(write: Write, make: Make) -> None:
    write("host/__init__.py", "")
    write("host/core.py", "def run(q, mask=None):\n    return (q, mask)\n")
    seen: list[Any] = []

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(query: Any, attention_mask: Any = None) -> Any:
            seen.append((query, attention_mask))
            return original(query=query, attention_mask=attention_mask)

        return replacement

    names = {"query": "q", "attention_mask": "mask"}
    make(seam("host.core:run", wrap=wrap, needs=("query", "attention_mask"), renames=names)).install()
    core = load("host.core")
    assert core.run(1, mask=2) == core.run(q=1, mask=2) == (1, 2)
    assert seen == [(1, 2), (1, 2)]


# -- uninstall


def test_install_twice_is_a_no_op(host: None, make: Make) -> None:
    seams = make(seam())
    seams.install()
    core = load("host.core")
    wrapper, finders = core.forward, list(sys.meta_path)
    seams.install()
    assert core.forward is wrapper
    assert sys.meta_path == finders


def test_uninstall_restores_identity_and_leaves_no_finder(host: None, make: Make) -> None:
    core, finders = load("host.core"), list(sys.meta_path)
    original = core.forward
    seams = make(seam())
    seams.install()
    assert seams.uninstall() == []
    assert core.forward is original
    assert sys.meta_path == finders
    assert only(seams).status == "off"
    del sys.modules["host.core"]
    assert load("host.core").forward(1) == ("forward", 1, 0)


def test_copies_of_the_wrapper_made_later_are_restored_or_switched_off(
    host: None, write: Write, make: Make
) -> None:
    write("host/user.py", "from host.core import forward\n")
    write("script.py", "from host.core import forward\nkept = [forward]\n")
    seams = make(seam())
    seams.install()
    user, script = load("host.user"), load("script")
    seams.uninstall()
    assert user.forward is script.forward is load("host.core").forward  # restored
    assert script.kept[0](1) == ("forward", 1, 0)  # in no module's names: switched off


def test_a_second_table_hooks_copies_that_the_first_one_left_behind(
    host: None, write: Write, make: Make
) -> None:
    write("script.py", "from host.core import forward\n")
    first = make(seam())
    first.install()
    script = load("script")
    first.uninstall()
    second = make(seam())
    second.install()
    assert script.forward(1) == ("hooked", ("forward", 1, 0))
    second.uninstall()
    assert script.forward is load("host.core").forward


def test_a_second_table_at_the_same_time_does_not_hook_twice(host: None, make: Make) -> None:
    make(seam()).install()
    second = make(seam())
    second.install()
    core = load("host.core")
    assert core.forward(1) == ("hooked", ("forward", 1, 0))
    assert sorted(state.status for state in second.report()) == ["absent"]
    assert "another table of megacp" in second.table()


def test_train_uninstall_install_again_hooks_once(host: None, make: Make) -> None:
    core = load("host.core")
    seams = make(seam())
    for _ in range(3):
        seams.install()
        assert core.forward(1) == ("hooked", ("forward", 1, 0))
        seams.uninstall()
        assert core.forward(1) == ("forward", 1, 0)


# -- other frameworks


def rival(function: Callable[..., Any], wraps: bool = True) -> Callable[..., Any]:
    """Wrap as code of a module named rival would."""
    names: dict[str, Any] = {"__name__": "rival.hooks", "functools": functools}
    decorate = "@functools.wraps(f)" if wraps else ""
    source = f"def take(f):\n    {decorate}\n    def theirs(*a, **k):\n        return ('rival', f(*a, **k))\n"
    exec(source + "    return theirs\n", names)
    wrapped: Callable[..., Any] = names["take"](function)
    return wrapped


@pytest.mark.parametrize("wraps", [True, False])
def test_a_framework_that_hooked_before_us_is_named_and_kept(host: None, make: Make, wraps: bool) -> None:
    core = load("host.core")
    core.forward = theirs = rival(core.forward, wraps)
    seams = make(seam())
    seams.install()
    assert core.forward(1) == ("hooked", ("rival", ("forward", 1, 0)))
    assert "host.core:forward was hooked before megacp by rival.hooks.theirs" in only(seams).notes[0]
    assert seams.uninstall() == []
    assert core.forward is theirs


@pytest.mark.parametrize("wraps", [True, False])
def test_a_framework_that_wrapped_us_is_reported_and_not_clobbered(
    host: None, make: Make, wraps: bool
) -> None:
    core = load("host.core")
    seams = make(seam(required=True))
    seams.install()
    core.forward = theirs = rival(core.forward, wraps)
    assert only(seams).status == "hooked"
    assert "hooked after megacp by rival.hooks.theirs" in only(seams).notes[0]
    seams.check()
    (left,) = seams.uninstall()
    assert "rival.hooks.theirs" in left.notes[0]
    assert core.forward is theirs
    assert core.forward(1) == ("rival", ("forward", 1, 0))
    seams.install()  # works again from below, and is not put on top once more
    assert core.forward is theirs
    assert core.forward(1) == ("rival", ("hooked", ("forward", 1, 0)))


def test_a_framework_that_replaced_us_is_reported_and_refused(host: None, make: Make) -> None:
    core = load("host.core")
    seams = make(seam(required=True, absent_means="attention across ranks"))
    seams.install()
    theirs = rival(len)
    core.forward = theirs
    assert only(seams).status == "replaced"
    with pytest.raises(SeamError, match=r"no longer in force[^$]*by rival.hooks.theirs[^$]*across ranks"):
        seams.check()
    (left,) = seams.uninstall()
    assert "was replaced after megacp hooked it" in left.notes[0]
    assert core.forward is theirs


def test_decorators_of_the_host_and_of_python_are_no_other_framework(write: Write, make: Make) -> None:
    write("host/__init__.py", "")
    write("host/wrap.py", "import functools\ndef deco(f):\n    return functools.wraps(f)(lambda *a: f(*a))\n")
    write(
        "host/core.py",
        "import contextlib\nfrom host.wrap import deco\n@deco\n@contextlib.contextmanager\n"
        "def forward(q):\n    yield q\n",
    )
    seams = make(seam())
    seams.install()
    load("host.core")
    assert only(seams).notes == ()


# -- refusals


def test_a_required_seam_without_target_stops_the_import_and_says_what_was_tried(
    host: None, make: Make
) -> None:
    seams = make(
        seam(
            ["host.core:foward", "host.core:Attention.fwd", "host.core:Attn.forward"],
            required=True,
            absent_means="attention across ranks",
        )
    )
    seams.install()
    with pytest.raises(SeamError) as caught:
        load("host.core")
    text = str(caught.value)
    assert "the seam 'attention' finds no place to hook" in text
    assert "host.core:foward: there is no 'foward' in host.core; close to it: forward" in text
    assert "host.core:Attention.fwd: there is no 'fwd' in host.core.Attention" in text
    assert "host.core:Attn.forward: there is no 'Attn' in host.core" in text
    assert "Not supported without it: attention across ranks." in text
    assert "'megacp.seams'" in text


def test_a_late_install_that_must_fail_leaves_nothing_hooked(host: None, make: Make) -> None:
    core = load("host.core")
    original, finders = core.forward, list(sys.meta_path)
    seams = make(seam(), seam("host.core:gone", "groups", required=True))
    with pytest.raises(SeamError, match="'groups'"):
        seams.install()
    assert core.forward is original
    assert sys.meta_path == finders


def test_a_missing_parameter_is_named_with_those_that_are_there(host: None, make: Make) -> None:
    load("host.core")
    seams = make(seam(needs=("q", "attention_mask"), required=True))
    with pytest.raises(SeamError, match=r"its parameters are \(q, k=0\); it lacks attention_mask"):
        seams.install()


def test_an_optional_seam_that_does_not_fit_is_told_in_the_table(host: None, make: Make) -> None:
    load("host.core")
    seams = make(seam(needs=("mask",), absent_means="documents"))
    seams.install()
    assert only(seams).status == "absent"
    assert "it lacks mask" in seams.table()
    assert "without it, not supported: documents" in seams.table()
    seams.check()
    with pytest.raises(SeamError, match="it lacks mask"):
        seams.check("attention")


def test_one_of_every_target_that_exists_but_does_not_fit_is_refused(host: None, make: Make) -> None:
    load("host.core")
    targets = ["host.core:forward", "host.core:Attention.scale", "host.core:absent"]
    seams = make(seam(targets, every=True, needs=("q",), required=True))
    with pytest.raises(SeamError, match=r"Attention.scale: its parameters are \(x\); it lacks q"):
        seams.install()


def test_check_refuses_modules_that_do_not_exist_and_waits_for_those_that_do(host: None, make: Make) -> None:
    gone = make(seam(["host.model:forward", "elsewhere.core:forward"], required=True))
    gone.install()
    load("host")
    with pytest.raises(SeamError, match=r"there is no module host\.model[^$]*no module elsewhere\.core"):
        gone.check()
    there = make(seam(["host.model:forward", "host.core:forward"], required=True))
    there.install()
    there.check()
    with pytest.raises(SeamError, match=r"host\.core:forward: not imported yet"):
        there.check(now=True)
    assert "host.core" not in sys.modules
    load("host.core")
    there.check(now=True)


def test_a_class_or_a_property_is_no_target(write: Write, make: Make) -> None:
    write("host/__init__.py", "")
    write("host/core.py", "class A:\n    @property\n    def size(self):\n        return 1\n")
    load("host.core")
    seams = make(seam("host.core:A", "whole"), seam("host.core:A.size", "size"))
    seams.install()
    assert "it is a class; name one of its methods" in seams.table()
    assert "it is no function but property" in seams.table()


def test_a_mock_or_none_in_place_of_an_optional_library_counts_as_absent(write: Write, make: Make) -> None:
    write("host/__init__.py", "")
    write("host/core.py", "from unittest.mock import MagicMock\nA = MagicMock()\nB = None\nf = MagicMock()\n")
    write("host/real.py", "class A:\n    def forward(self, q):\n        return q\n")
    targets = ["host.core:A.forward", "host.core:B.forward", "host.core:f", "host.real:A.forward"]
    seams = make(seam(targets, every=True, required=True, needs=("q",)))
    seams.install()
    load("host.core")
    load("host.real")
    seams.check()
    assert only(seams).targets == ("host.real:A.forward",)
    assert only(seams).findings[0].text == "'A' is no class here but MagicMock"


def test_a_row_of_the_same_role_fills_in_for_a_required_one(host: None, make: Make) -> None:
    seams = make(
        seam("host.gone:forward", "built in", role="attention", required=True),
        seam("host.core:forward", "the fork's", role="attention"),
    )
    seams.install()
    load("host.core")
    seams.check(now=True)


def test_a_role_that_is_in_no_row_is_refused(make: Make) -> None:
    seams = make(seam())
    seams.install()
    with pytest.raises(SeamError, match="no row of the table has the role 'rotary'"):
        seams.check("rotary")


@pytest.mark.parametrize("target", ["host.core", "host.core:", "host core:f", ":f", "host.core:a..b"])
def test_a_target_that_is_badly_written_is_refused(target: str) -> None:
    with pytest.raises(SeamError, match=r"a target is written 'package\.module:function'"):
        seam(target)


def test_two_rows_of_one_name_are_refused() -> None:
    with pytest.raises(SeamError, match="two seams have the name 'attention'"):
        Seams([seam(), seam()])


def test_a_wrap_that_fails_is_named(host: None, make: Make) -> None:
    load("host.core")
    seams = make(seam(wrap=lambda original: 1 / 0))
    with pytest.raises(SeamError, match=r"'attention'.*host.core:forward failed: ZeroDivisionError"):
        seams.install()


# -- kinds of imports


def test_a_module_found_by_somebody_elses_finder_is_hooked(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Editable installs put their own finder last, and map a package to a folder outside the import path."""
    package = tmp_path / "checkout" / "src"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "core.py").write_text("def forward(q):\n    return q\n")

    class Editable:
        @classmethod
        def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
            if fullname != "host":
                return None
            return importlib.util.spec_from_file_location(fullname, package / "__init__.py")

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Editable])
    make(seam()).install()
    try:
        assert load("host.core").forward(1) == ("hooked", 1)
    finally:
        for name in ("host", "host.core"):
            sys.modules.pop(name, None)


def test_a_namespace_package_keeps_working(write: Write, make: Make) -> None:
    write("nspace/core.py", "def forward(q):\n    return q\n")
    seams = make(seam("nspace.core:forward"), seam("nspace:forward", "in the namespace"))
    seams.install()
    assert load("nspace.core").forward(1) == ("hooked", 1)
    assert [state.status for state in seams.report()] == ["hooked", "absent"]


def test_a_hooked_module_keeps_its_loader_and_its_source(host: None, make: Make) -> None:
    make(seam()).install()
    core = load("host.core")
    assert isinstance(core.__loader__, importlib.machinery.SourceFileLoader)
    assert core.__spec__.loader is core.__loader__
    spec = importlib.util.find_spec("host.core")
    assert spec is not None
    assert spec.origin == core.__file__


def test_two_finders_that_ask_all_others_do_not_ask_each_other_for_ever(
    host: None, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asking:
        @classmethod
        def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
            for finder in sys.meta_path:
                spec = finder.find_spec(fullname, path, target) if finder is not cls else None
                if spec is not None:
                    return spec
            return None

    make(seam()).install()
    make(seam("host.core:Attention.forward", "method")).install()
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Asking])
    core = load("host.core")
    assert core.forward(1)[0] == core.Attention().forward(1)[0] == "hooked"


def test_an_import_that_fails_fails_as_it_would(write: Write, make: Make) -> None:
    write("host/__init__.py", "")
    write("host/core.py", "raise RuntimeError('no device')\n")
    seams = make(seam())
    seams.install()
    with pytest.raises(RuntimeError, match="no device"):
        load("host.core")
    assert only(seams).status == "waiting"


# -- rows from outside


class Entry:
    """What importlib.metadata gives for one entry point."""

    name, value = "fork", "fork.cp:ROWS"

    class dist:
        name = "megatron-fork"

    def __init__(self, loaded: Any) -> None:
        self.loaded = loaded

    def load(self) -> Any:
        if isinstance(self.loaded, Exception):
            raise self.loaded
        return self.loaded


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Entry]]:
    found: list[Entry] = []

    def entry_points(*, group: str) -> list[Entry]:
        assert group == "megacp.seams"
        return found

    monkeypatch.setattr(rows_module.metadata, "entry_points", entry_points)
    yield found


def test_entry_points_give_rows_or_a_callable_for_them(entries: list[Entry]) -> None:
    entries += [Entry([seam()]), Entry(lambda: iter([seam(name="second")]))]
    assert [row.name for row in entry_point_rows()] == ["attention", "second"]


def test_an_entry_point_that_cannot_be_loaded_is_named(entries: list[Entry]) -> None:
    entries.append(Entry(ImportError("no fork.cp")))
    with pytest.raises(SeamError, match=r"'fork = fork.cp:ROWS' of megatron-fork .* ImportError"):
        entry_point_rows()


def test_an_entry_point_that_gives_something_else_is_named(entries: list[Entry]) -> None:
    entries.append(Entry(["host.core:forward"]))
    with pytest.raises(SeamError, match=r"megatron-fork .* must give rows .* gives 'host.core:forward'"):
        entry_point_rows()


needs_toml = pytest.mark.skipif(
    importlib.util.find_spec("tomllib") is None and importlib.util.find_spec("tomli") is None,
    reason="python 3.10 has no TOML reader, and tomli is not installed",
)


@needs_toml
def test_a_file_maps_a_forks_names_onto_a_built_in_wrapper(write: Write, tmp_path: Path, make: Make) -> None:
    write("host/__init__.py", "")
    write("host/attn.py", "class Fused:\n    def run(self, q):\n        return q\n")
    known = seam("host.core:forward", "core attention", needs=("query",), required=True)
    file = tmp_path / "seams.toml"
    file.write_text(
        '[[seam]]\nrole = "core attention"\ntarget = "host.attn:Fused.run"\nparameters = {query = "q"}\n'
    )
    seams = make(known, *load_rows(file, [known]))
    seams.install()
    assert load("host.attn").Fused().run(q=1) == ("hooked", 1)
    seams.check()
    assert seams.report()[1].name == "core attention (host.attn:Fused.run)"


@needs_toml
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no rows"),
        ("[[seam]\n", "is not valid TOML"),
        ('[[seam]]\ntarget = "a:b"\n', "row 1 of .* has no field 'role'"),
        ('[[seam]]\nrole = "attention"\n', "row 1 of .* has no field 'target'"),
        ('[[seam]]\nrole = "atention"\ntarget = "a:b"\n', "roles are 'attention'. Did you mean 'attention'?"),
        ('[[seam]]\nrole = "attention"\ntarget = "a:b"\nwrap = "c"\n', "unknown field 'wrap'"),
        ('[[seam]]\nrole = "attention"\ntarget = 3\n', "target 3; it must be a string"),
        ('[[seam]]\nrole = "attention"\ntarget = "a"\n', "a target is written"),
        ('[[seam]]\nrole = "attention"\ntarget = "a:b"\nparameters = {q = 1}\n', "parameters {'q': 1}"),
    ],
)
def test_a_faulty_file_of_rows_is_refused_with_its_fault(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "seams.toml"
    file.write_text(text)
    with pytest.raises(SeamError, match=message):
        load_rows(file, [seam()])


@needs_toml
def test_a_file_of_rows_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(SeamError, match=r"gone\.toml cannot be read: No such file"):
        load_rows(tmp_path / "gone.toml", [seam()])


def test_a_python_without_toml_reader_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tomllib", None)
    monkeypatch.setitem(sys.modules, "tomli", None)
    with pytest.raises(SeamError, match=r"python 3\.11 or later, or install the package tomli"):
        load_rows(tmp_path / "seams.toml", [seam()])


def test_the_table_reads_well(host: None, write: Write, make: Make) -> None:
    write("host/user.py", "from host.core import forward\n")
    load("host.user")
    seams = make(
        seam(),
        seam("host.core:Attention.frward", "rotary", absent_means="rotary positions"),
        seam("host.later:f", "groups"),
    )
    seams.install()
    assert seams.table().splitlines() == [
        "seam       state     where",
        "attention  hooked    host.core:forward",
        "                     also in host.user.forward",
        "rotary     absent    host.core:Attention.frward: there is no 'frward' in host.core.Attention; "
        "close to it: forward",
        "                     without it, not supported: rotary positions",
        "groups     waiting   host.later:f (not imported)",
    ]
