"""The patch engine on a small library that each test writes for itself."""

import importlib
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from skyrl_qwen38 import patching
from skyrl_qwen38.patching import Fingerprint, Patch, PatchError, PatchRefused, PatchReport, Target, Verdict

LIBRARY = '''
def double(x, times=2):
    """Doubles."""
    return x * times


class Base:
    def inherited(self):
        return "base"


class Thing(Base):
    @staticmethod
    def size():
        return 1
'''


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Writes the source of a module named `victim` and imports it; patches left applied are taken back at the end."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(source: str = LIBRARY) -> ModuleType:
        sys.modules.pop("victim", None)
        for old in tmp_path.glob("**/*.pyc"):
            old.unlink()
        (tmp_path / "victim.py").write_text(source)
        importlib.invalidate_caches()
        return importlib.import_module("victim")

    yield write
    for name in list(patching._applied):
        patching.undo(name)
    sys.modules.pop("victim", None)


def known(target: Any) -> dict[str, Fingerprint]:
    return {"victim 1": patching.fingerprint(target)}


def doubling(victim: ModuleType, **changed: Any) -> Patch:
    def apply(changes: patching.Changes, settings: Any) -> None:
        changes.replace("victim.double", lambda x, times=2: -x)

    arguments = {
        "name": "negate",
        "why": "shows the engine",
        "scope": "trainer",
        "targets": (Target("victim.double", known(victim.double)),),
        "apply": apply,
    } | changed
    return Patch(**arguments)


def verdicts(reports: list[PatchReport]) -> list[str]:
    return [str(report) for report in reports]


def test_apply_replaces_and_undo_restores_the_original(library):
    victim = library()
    original = victim.double
    assert verdicts(patching.apply([doubling(victim)], "trainer", {"negate": True})) == ["applied"]
    assert victim.double(3) == -3
    assert patching.undo("negate")
    assert victim.double is original
    assert not patching.undo("negate")


def test_a_second_apply_reports_it_and_changes_nothing(library):
    victim = library()
    calls = []

    def apply(changes: patching.Changes, settings: Any) -> None:
        calls.append(settings)
        changes.replace("victim.double", lambda x: -x)

    patch = doubling(victim, apply=apply)
    patching.apply([patch], "trainer", {}, settings="given")
    replaced = victim.double
    assert verdicts(patching.apply([patch], "trainer", {}, settings="again")) == ["applied"]
    assert victim.double is replaced
    assert calls == ["given"]


def test_off_leaves_the_target_and_takes_an_applied_patch_back(library):
    victim = library()
    original = victim.double
    assert verdicts(patching.apply([doubling(victim)], "trainer", {"negate": False})) == ["off (flag)"]
    assert victim.double is original
    patching.apply([doubling(victim)], "trainer", {"negate": True})
    patching.apply([doubling(victim)], "trainer", {"negate": False})
    assert victim.double is original


@pytest.mark.parametrize(
    ("source", "verdict"),
    [
        (LIBRARY.replace("return x * times", "return times * x"), "refused (target changed: the body of victim.double"),
        (LIBRARY.replace("(x, times=2)", "(x, times)"), "refused (target changed: victim.double has the signature"),
        (
            LIBRARY.replace("(x, times=2)", "(x, *, times=2)"),
            "refused (target changed: victim.double has the signature",
        ),
        (LIBRARY.replace("def double", "def twice"), "not applicable (target absent)"),
        ("import nowhere_at_all\n", "refused (target changed: its module cannot be imported here"),
    ],
    ids=["body", "default", "keyword-only", "absent", "broken-import"],
)
def test_a_changed_target_is_not_patched(library, tmp_path, source, verdict):
    patch = doubling(library())
    if "nowhere_at_all" in source:
        (tmp_path / "victim.py").write_text(source)
        sys.modules.pop("victim")
        importlib.invalidate_caches()
    else:
        library(source)
    try:
        reports = patching.apply([patch], "trainer", {})
    except PatchRefused as refused:
        reports = refused.reports
    assert str(reports[0]).startswith(verdict)
    assert "negate" not in patching._applied


def test_comments_around_a_target_do_not_change_its_fingerprint(library):
    patch = doubling(library())
    library("# another licence\n\n" + LIBRARY)
    assert verdicts(patching.apply([patch], "trainer", {})) == ["applied"]


def test_a_known_signature_without_source_accepts_any_body(library):
    victim = library()
    patch = doubling(victim, targets=(Target("victim.double", {"1": Fingerprint("(x, times=…)")}),))
    library(LIBRARY.replace("x * times", "0"))
    assert verdicts(patching.apply([patch], "trainer", {})) == ["applied"]


def test_a_library_that_is_not_installed_is_absent(library):
    patch = doubling(library(), targets=(Target("no_such_library.module.name"),))
    (report,) = patching.apply([patch], "trainer", {})
    assert report == PatchReport("negate", Verdict.NOT_APPLICABLE, "no_such_library is not installed")


def test_landed_upstream_is_not_needed(library):
    victim = library()
    original = victim.double
    assert verdicts(patching.apply([doubling(victim, landed=lambda: True)], "trainer", {})) == [
        "not needed (upstream has it)"
    ]
    assert victim.double is original


def test_only_the_scope_asked_for_is_examined(library):
    victim = library()
    other = doubling(victim, name="elsewhere", scope="vllm", targets=(Target("victim.gone"),))
    reports = patching.apply([doubling(victim), other], "trainer", {"elsewhere": True})
    assert [report.name for report in reports] == ["negate"]


def test_nothing_is_applied_when_one_is_refused(library):
    victim = library()
    original = victim.double
    wrong = doubling(victim, name="wrong", targets=(Target("victim.Thing", {"1": Fingerprint("()", "0" * 16)}),))
    with pytest.raises(PatchRefused, match=r"wrong: the body of victim\.Thing") as refused:
        patching.apply([doubling(victim), wrong], "trainer", {})
    assert victim.double is original
    assert "trainer.qwen38.patches.<name>=false" in str(refused.value)


def test_a_patch_that_fails_half_way_leaves_nothing_of_it_nor_of_those_before(library):
    victim = library()
    before = dict(vars(victim))

    def apply(changes: patching.Changes, settings: Any) -> None:
        changes.replace("victim.Thing.size", lambda: 2)
        changes.on_undo(lambda: undone.append("registration"))
        raise OSError("disk on fire")

    undone: list[str] = []
    broken = doubling(victim, name="broken", targets=(Target("victim.Thing"),), apply=apply)
    with pytest.raises(PatchError, match="patch broken failed and was undone: disk on fire"):
        patching.apply([doubling(victim), broken], "trainer", {})
    assert dict(vars(victim)) == before
    assert victim.Thing.size() == 1
    assert undone == ["registration"]
    assert not patching._applied


def test_a_replacement_is_never_taken_for_the_original(library):
    victim = library()
    patching.apply([doubling(victim)], "trainer", {})
    second = doubling(victim, name="second", targets=(Target("victim.double"),))
    with pytest.raises(PatchError, match=r"victim\.double is already the replacement made by patch negate"):
        patching.apply([doubling(victim), second], "trainer", {})
    assert victim.double(3) == -3


def test_a_subclass_of_a_replaced_class_is_an_original(library):
    victim = library()
    changes = patching.Changes("first")
    changes.replace("victim.Base", type("Base", (), {}))
    victim.Child = type("Child", (victim.Base,), {})
    patching.Changes("second").replace("victim.Child", type("Child", (), {}))
    changes.undo()


def test_replaced_again_by_somebody_else_is_refused(library):
    victim = library()
    patch = doubling(victim)
    patching.apply([patch], "trainer", {})
    victim.double = lambda x: 0
    with pytest.raises(PatchRefused, match=r"victim\.double was replaced by something else"):
        patching.apply([patch], "trainer", {})


@pytest.mark.parametrize("name", ["size", "inherited"])
def test_class_attributes_come_back_as_they_were(library, name):
    victim = library()
    before = dict(vars(victim.Thing))
    changes = patching.Changes("p")
    changes.replace(f"victim.Thing.{name}", lambda *_: "ours")
    assert getattr(victim.Thing(), name)() == "ours"
    changes.undo()
    assert dict(vars(victim.Thing)) == before


def test_add_supplies_a_missing_name_only(library):
    victim = library()
    changes = patching.Changes("p")
    changes.add("victim.helper", lambda: 1)
    assert victim.helper() == 1
    with pytest.raises(PatchError, match=r"victim\.double exists already"):
        changes.add("victim.double", lambda: 1)
    with pytest.raises(PatchError, match=r"victim\.missing does not exist"):
        changes.replace("victim.missing", lambda: 1)
    changes.undo()
    assert not hasattr(victim, "helper")


def test_a_flag_that_names_no_patch_is_an_error(library):
    with pytest.raises(PatchError, match="no patch is named 'negat'"):
        patching.apply([doubling(library())], "trainer", {"negat": True})


def test_refusal_survives_the_way_to_the_driver():
    refused = PatchRefused([PatchReport("p", Verdict.REFUSED, "it moved")])
    copy = pickle.loads(pickle.dumps(refused))
    assert str(copy) == str(refused)
    assert copy.reports == refused.reports


def test_report_dict_names_the_ranks_that_disagree():
    same, other = PatchReport("p", Verdict.APPLIED), PatchReport("p", Verdict.REFUSED, "it moved")
    assert patching.report_dict([[same], [same]]) == {"p": "applied"}
    assert patching.report_dict([[same], [other], [same]]) == {
        "p": "applied (ranks 0, 2); refused (target changed: it moved) (ranks 1)"
    }


def test_table_shows_every_patch_with_verdict_and_reason(library):
    from rich.console import Console

    patch = doubling(library())
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(patching.table([[PatchReport("negate", Verdict.APPLIED)]] * 3, [patch]))
    text = console.export_text()
    assert "patches (3 workers)" in text
    assert "negate" in text
    assert "applied" in text
    assert "shows the engine" in text


def test_flags_travel_through_the_environment(library, monkeypatch, caplog):
    patches = [doubling(library()), doubling(library(), name="second")]
    flags = {"negate": False, "second": True}
    monkeypatch.setenv(patching.PATCHES_VARIABLE, patching.patch_flags_to_text(flags))
    assert patching.patch_flags_from_environment(patches) == flags
    monkeypatch.setenv(patching.PATCHES_VARIABLE, " negate=0 ,second=maybe,unknown=1")
    assert patching.patch_flags_from_environment(patches) == {"negate": False}
    assert "'second=maybe' is not name=0 or name=1" in caplog.text
    monkeypatch.delenv(patching.PATCHES_VARIABLE)
    assert patching.patch_flags_from_environment(patches) == {}
