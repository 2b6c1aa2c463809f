"""The patch engine: one small named change to another library, applied once, reported, reversible.

A patch says *what* it changes (`Target`s) and *how* (`Patch.apply`); the engine decides *whether*, and answers with
one of five verdicts (`Verdict`). It knows no patch and imports no library that a patch touches.

The rules it keeps:

* **Nothing half-applied.** All patches are examined before the first is applied; if one is refused none is applied,
  and if one fails while it is applied, everything this call did is undone.
* **Once.** A second `apply` of an applied patch reports it and changes nothing.
* **Features, not versions.** A target is recognised by its signature and, where the patch leans on the body, by a
  hash of its source. A body that no patch author has seen is refused even if the signature fits, because a patch over
  changed code fails silently.
* **Reversible.** Every change goes through `Changes`, which remembers the original.
"""

import enum
import functools
import hashlib
import importlib
import inspect
import logging
import os
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Scope = Literal["trainer", "vllm"]

PATCHES_VARIABLE = "SKYRL_QWEN38_PATCHES"
"""Carries the flags to processes that have no configuration: `name=0|1`, comma-separated."""

_log = logging.getLogger(__name__)
_MARK = "__skyrl_qwen38_patch__"
_ABSENT: Any = object()


class Verdict(enum.StrEnum):
    """What became of a patch in this process."""

    APPLIED = "applied"
    OFF = "off (flag)"
    NOT_NEEDED = "not needed (upstream has it)"
    NOT_APPLICABLE = "not applicable (target absent)"
    REFUSED = "refused"


@dataclass(frozen=True)
class PatchReport:
    """The verdict on one patch; `detail` is the reason where the verdict alone does not say it."""

    name: str
    verdict: Verdict
    detail: str = ""

    def __str__(self) -> str:
        if self.verdict is Verdict.REFUSED:
            return f"refused (target changed: {self.detail})"
        return self.verdict.value


class PatchError(RuntimeError):
    """A patch was used wrongly or failed while it was applied; nothing of it is left in place."""


class PatchRefused(PatchError):
    """A patch that the run needs does not fit the installed code. `reports` holds the verdict on every patch."""

    def __init__(self, reports: Sequence[PatchReport]):
        self.reports = tuple(reports)
        refused = "; ".join(f"{r.name}: {r.detail}" for r in reports if r.verdict is Verdict.REFUSED)
        super().__init__(
            f"patch refused, the code it was written against has changed ({refused}); install the versions listed in "
            "pyproject.toml, or switch it off with trainer.qwen38.patches.<name>=false"
        )

    def __reduce__(self) -> tuple[type["PatchRefused"], tuple[tuple[PatchReport, ...]]]:
        return type(self), (self.reports,)  # Ray pickles it on its way to the driver


@dataclass(frozen=True)
class Fingerprint:
    """What a target looked like when the patch was written.

    Args:
        signature: parameter names, their kinds and whether each has a default.
        source: first 16 hex digits of the SHA-256 of the dedented source, or None where only the signature matters
            (a public function that is called, or code of this project).
    """

    signature: str
    source: str | None = None


@dataclass(frozen=True)
class Target:
    """One dotted name that a patch changes or leans on.

    Args:
        dotted: module and attribute path, for example `megatron.core.utils.divide`.
        known: version of the library → fingerprint of the target in it. Versions are labels for people: the
            fingerprints alone decide. Empty where the name only has to exist.
    """

    dotted: str
    known: Mapping[str, Fingerprint] = field(default_factory=dict)


@dataclass(frozen=True)
class Patch:
    """A change to another library.

    Args:
        name: also the flag, `trainer.qwen38.patches.<name>`.
        why: one line for people.
        scope: the kind of process that needs it.
        targets: every name that it changes or leans on; all must exist for it to be applicable.
        apply: makes the change through the given `Changes`; the second argument is the settings object handed to
            `apply()`, which the engine does not look into.
        landed: True if the installed library has the fix already. Called only when every target exists.
    """

    name: str
    why: str
    scope: Scope
    targets: tuple[Target, ...]
    apply: Callable[["Changes", Any], None]
    landed: Callable[[], bool] = lambda: False


class Changes:
    """What one patch did, in order, each step with its way back."""

    def __init__(self, patch: str):
        self._patch = patch
        self._undo: list[Callable[[], None]] = []
        self._ours: list[tuple[Any, str, Any]] = []

    def replace(self, dotted: str, replacement: Any) -> Any:
        """Put `replacement` (a function or class) in place of the attribute at `dotted`; return the original.

        Raises:
            PatchError: the attribute does not exist, or what stands there is itself a patch's replacement, which must
                never be taken for the original.
        """
        owner, name = _owner(dotted)
        raw = inspect.getattr_static(owner, name, _ABSENT)
        if raw is _ABSENT:
            raise PatchError(f"patch {self._patch}: {dotted} does not exist, so it cannot be replaced")
        # Its own dictionary, because a subclass of a replaced class would inherit the mark.
        if (other := getattr(raw, "__dict__", {}).get(_MARK)) is not None:
            raise PatchError(
                f"patch {self._patch}: {dotted} is already the replacement made by patch {other}; undo that"
            )
        original = getattr(owner, name)
        self._set(owner, name, replacement)
        return original

    def add(self, dotted: str, value: Any) -> None:
        """Supply a name that the library lacks.

        Raises:
            PatchError: the name exists.
        """
        owner, name = _owner(dotted)
        if hasattr(owner, name):
            raise PatchError(f"patch {self._patch}: {dotted} exists already, so it is not supplied")
        self._set(owner, name, value)

    def on_undo(self, step: Callable[[], None]) -> None:
        """Remember the way back from a change that is not an attribute (a registration, for example)."""
        self._undo.append(step)

    def undo(self) -> None:
        """Take every step back, latest first."""
        while self._undo:
            self._undo.pop()()
        self._ours.clear()

    def displaced(self) -> list[str]:
        """Names of attributes set here that hold something else by now."""
        return [
            f"{getattr(owner, '__name__', owner)}.{name}"
            for owner, name, value in self._ours
            if inspect.getattr_static(owner, name, None) is not value
        ]

    def _set(self, owner: Any, name: str, value: Any) -> None:
        # The raw entry, not what attribute access makes of it: a class holds staticmethod objects, and an inherited
        # name must be deleted again rather than copied into the subclass.
        before = vars(owner).get(name, _ABSENT)
        setattr(value, _MARK, self._patch)
        setattr(owner, name, value)
        self._ours.append((owner, name, value))
        self._undo.append(functools.partial(_restore, owner, name, before))


def apply(patches: Iterable[Patch], scope: Scope, flags: Mapping[str, bool], settings: Any = None) -> list[PatchReport]:
    """Apply the patches of `scope` that are switched on, once in this process.

    Args:
        patches: every patch of the project, of any scope.
        flags: patch name → on or off; a patch without a flag is on.
        settings: handed to each patch untouched.

    Returns:
        One report a patch of this scope, in the order given.

    Raises:
        PatchError: a flag names no patch, or a patch failed half-way; everything this call did has been undone.
        PatchRefused: a patch that is switched on does not fit the installed code; no patch was applied.
    """
    patches = list(patches)
    if unknown := sorted(set(flags) - {patch.name for patch in patches}):
        raise PatchError(f"no patch is named {unknown[0]!r}; the patches are {', '.join(p.name for p in patches)}")
    patches = [patch for patch in patches if patch.scope == scope]
    reports = [_examine(patch, flags.get(patch.name, True)) for patch in patches]
    if any(report.verdict is Verdict.REFUSED for report in reports):
        raise PatchRefused(reports)

    done: list[str] = []
    for patch, report in zip(patches, reports, strict=True):
        if report.verdict is Verdict.OFF:
            undo(patch.name)  # the flags are the wanted state, also of a process that was patched before
        elif report.verdict is Verdict.APPLIED and patch.name not in _applied:
            changes = Changes(patch.name)
            try:
                patch.apply(changes, settings)
            except Exception as error:
                changes.undo()
                for name in reversed(done):
                    undo(name)
                raise PatchError(f"patch {patch.name} failed and was undone: {error}") from error
            _applied[patch.name] = changes
            done.append(patch.name)
    return reports


def undo(name: str) -> bool:
    """Take back the patch `name`; False if it was not applied in this process."""
    changes = _applied.pop(name, None)
    if changes is None:
        return False
    changes.undo()
    return True


def patch_flags_to_text(flags: Mapping[str, bool]) -> str:
    """The value of `PATCHES_VARIABLE` for these flags."""
    return ",".join(f"{name}={int(on)}" for name, on in flags.items())


def patch_flags_from_environment(patches: Iterable[Patch]) -> dict[str, bool]:
    """The flags of `patches` that `PATCHES_VARIABLE` sets; an entry that cannot be read is warned about and skipped.

    The driver has checked the flags; here a wrong entry must not stop a process that may need no patch at all.
    """
    names = {patch.name for patch in patches}
    flags = {}
    for entry in filter(None, os.environ.get(PATCHES_VARIABLE, "").split(",")):
        name, _, value = entry.strip().partition("=")
        if value not in ("0", "1"):
            _log.warning("%s: %r is not name=0 or name=1 and is skipped", PATCHES_VARIABLE, entry)
        elif name in names:
            flags[name] = value == "1"
    return flags


def fingerprint(target: Any) -> Fingerprint:
    """Signature and source hash of a function, method or class.

    Raises:
        OSError, TypeError: its source cannot be read.
    """
    source = textwrap.dedent(inspect.getsource(target)).strip()
    return Fingerprint(_signature(target), hashlib.sha256(source.encode()).hexdigest()[:16])


def report_dict(workers: Sequence[Sequence[PatchReport]]) -> dict[str, str]:
    """Patch name → verdict over all workers, for `summary.json`; workers that disagree are named by rank."""
    merged: dict[str, dict[str, list[int]]] = {}
    for rank, reports in enumerate(workers):
        for report in reports:
            merged.setdefault(report.name, {}).setdefault(str(report), []).append(rank)
    return {
        name: next(iter(verdicts))
        if len(verdicts) == 1
        else "; ".join(f"{verdict} (ranks {', '.join(map(str, ranks))})" for verdict, ranks in verdicts.items())
        for name, verdicts in merged.items()
    }


def table(workers: Sequence[Sequence[PatchReport]], patches: Iterable[Patch]) -> Any:
    """The reports of all workers as one `rich.table.Table`: patch, verdict, why."""
    from rich.table import Table  # vLLM's processes never print a table

    why = {patch.name: patch.why for patch in patches}
    count = f"{len(workers)} worker{'s' if len(workers) != 1 else ''}"
    result = Table(title=f"patches ({count})", title_justify="left")
    for column in ("patch", "verdict", "why"):
        result.add_column(column)
    for name, verdict in report_dict(workers).items():
        result.add_row(name, verdict, why.get(name, ""))
    return result


# Patch name → what it did in this process. Process-wide on purpose: the libraries that are patched are, too.
_applied: dict[str, Changes] = {}


def _examine(patch: Patch, on: bool) -> PatchReport:
    """The verdict that `apply` will reach, with nothing changed yet."""
    if not on:
        return PatchReport(patch.name, Verdict.OFF)
    if patch.name in _applied:
        if displaced := _applied[patch.name].displaced():
            detail = f"{displaced[0]} was replaced by something else after the patch had been applied"
            return PatchReport(patch.name, Verdict.REFUSED, detail)
        return PatchReport(patch.name, Verdict.APPLIED)
    try:
        found = [_resolve(target.dotted) for target in patch.targets]
    except _TargetAbsent as absent:
        return PatchReport(patch.name, Verdict.NOT_APPLICABLE, str(absent))
    except ImportError as error:
        return PatchReport(patch.name, Verdict.REFUSED, f"its module cannot be imported here, {error}")
    if patch.landed():
        return PatchReport(patch.name, Verdict.NOT_NEEDED)
    for target, value in zip(patch.targets, found, strict=True):
        if difference := _difference(target, value):
            return PatchReport(patch.name, Verdict.REFUSED, difference)
    return PatchReport(patch.name, Verdict.APPLIED)


class _TargetAbsent(Exception):
    """The library or the name is not there."""


def _resolve(dotted: str) -> Any:
    """The object at `dotted`: the longest importable module prefix, then attributes.

    Raises:
        _TargetAbsent: the library is not installed, or has no such name.
        ImportError: the module exists and something that it needs does not: that is a broken environment, and saying
            "absent" would hide it.
    """
    parts = dotted.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:cut])
        try:
            value: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
                continue
            raise
        for depth, name in enumerate(parts[cut:], start=cut + 1):
            value = getattr(value, name, _ABSENT)
            if value is _ABSENT:
                raise _TargetAbsent(f"{'.'.join(parts[:depth])} does not exist")
        return value
    raise _TargetAbsent(f"{parts[0]} is not installed")


def _owner(dotted: str) -> tuple[Any, str]:
    owner, _, name = dotted.rpartition(".")
    try:
        return (_resolve(owner) if "." in owner else importlib.import_module(owner)), name
    except (_TargetAbsent, ModuleNotFoundError) as error:
        raise PatchError(f"{dotted} cannot be reached: {error}") from None


def _difference(target: Target, value: Any) -> str:
    """In words, how `value` differs from every known fingerprint of `target`; empty if it is one of them."""
    if not target.known:
        return ""
    versions = ", ".join(target.known)
    signature = _signature(value)
    candidates = [known for known in target.known.values() if known.signature == signature]
    if not candidates:
        expected = next(reversed(target.known.values())).signature
        return f"{target.dotted} has the signature {signature}, the patch knows {expected} ({versions})"
    if any(known.source is None for known in candidates):
        return ""
    try:
        source = fingerprint(value).source
    except (OSError, TypeError):
        return f"the source of {target.dotted} cannot be read, so it cannot be compared with {versions}"
    if any(known.source == source for known in candidates):
        return ""
    return f"the body of {target.dotted} (hash {source}) is none that the patch knows ({versions})"


def _signature(value: Any) -> str:
    """Parameter names, kinds and whether each has a default: what a caller or a replacement depends on.

    Annotations and the text of defaults are left out, because they print differently with postponed annotations.
    """
    words = []
    for parameter in inspect.signature(value).parameters.values():
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else "=…"
        mark = {parameter.KEYWORD_ONLY: "kw ", parameter.POSITIONAL_ONLY: "pos "}.get(parameter.kind, "")
        words.append(f"{mark}{star}{parameter.name}{default}")
    return f"({', '.join(words)})"


def _restore(owner: Any, name: str, before: Any) -> None:
    if before is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, before)
