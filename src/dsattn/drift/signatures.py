"""How a signature changed, what that means for a caller, and which calls it concerns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from dsattn.drift.annotations import widens
from dsattn.drift.findings import Effect, Finding
from dsattn.drift.snapshot import VAR_KEYWORD, VAR_POSITIONAL, Exported, Parameter
from dsattn.drift.watch import Call

_KEYWORD_ONLY, _POSITIONAL_ONLY = "keyword-only", "positional-only"
_SHIFT = "positional callers break, silently where the value fits"
_KEEPS = "keyword callers unaffected"


class Signatures:
    """Two signatures of one name, and the watched calls of it.

    Args:
        before: in the old release.
        after: in the new one.
        calls: the watched calls of that name.
    """

    def __init__(self, before: Exported, after: Exported, calls: Sequence[Call]) -> None:
        self.before, self.after, self.calls = before, after, calls
        self.old = {each.name: each for each in before.parameters}
        self.new = {each.name: each for each in after.parameters}
        self.old_at = {each.name: at for at, each in enumerate(before.positions)}
        self.new_at = {each.name: at for at, each in enumerate(after.positions)}
        self.renamed = dict(self._renames())

    def findings(self) -> Iterator[Finding]:
        """Every difference."""
        for name in self.old:
            if name not in self.new:
                yield from self._gone(self.old[name])
        for name in self.new:
            if name in self.old:
                yield from self._changed(self.old[name], self.new[name])
            elif name not in self.renamed.values():
                yield from self._added(self.new[name])
        moved = {name: at for name, at in self.old_at.items() if self.new_at.get(name, at) != at}
        if moved:
            yield self._moved(moved)
        before, after = self.before.returns, self.after.returns
        if before != after:
            what = f"returns {after or 'without annotation'}, was {before or 'without annotation'}"
            yield self._finding(what, "read", "whether callers can still use the result", lambda _: True)

    def _finding(
        self, what: str, effect: Effect, means: str, touched: Callable[[Call], bool], parameter: str | None = None
    ) -> Finding:
        touches = tuple(call.label for call in self.calls if touched(call))
        return Finding("parameters", self.before.name, what, effect, means, touches, parameter)

    def _renames(self) -> Iterator[tuple[str, str]]:
        """(old name, new name) of what stands at the same place with the same default and annotation."""
        for before, after in zip(self.before.positions, self.after.positions, strict=False):
            same = (before.kind, before.default, before.annotation) == (after.kind, after.default, after.annotation)
            if same and before.name not in self.new and after.name not in self.old:
                yield before.name, after.name

    def _gone(self, parameter: Parameter) -> Iterator[Finding]:
        name = parameter.name
        if parameter.kind in (VAR_POSITIONAL, VAR_KEYWORD):
            # What callers pass to it has no name of its own.
            if not self.after.has(parameter.kind):
                yield self._gone_variadic(parameter)
            return
        if name in self.renamed:
            what = f"{name} is called {self.renamed[name]}"
            means = f"keyword callers (TypeError); positional ones unaffected if {name} means the same"
            yield self._finding(what, "breaks", means, lambda call: self._keyword_breaks(call, name), name)
            return

        def touched(call: Call) -> bool:
            return call.by_position(self.before, name) or self._keyword_breaks(call, name)

        if self.after.has(VAR_KEYWORD):
            means = "keyword callers pass it on to whoever reads the rest"
            yield self._finding(f"{name} is gone", "silent", means, touched, name)
        else:
            yield self._finding(f"{name} is gone", "breaks", "callers that pass it (TypeError)", touched, name)

    def _keyword_breaks(self, call: Call, name: str) -> bool:
        return call.by_keyword(self.before, name) and call.needs(name)

    def _gone_variadic(self, parameter: Parameter) -> Finding:
        what = f"{parameter.name} is gone"
        if parameter.kind == VAR_POSITIONAL:
            means, count = "callers that pass more by position (TypeError)", len(self.old_at)
            return self._finding(what, "breaks", means, lambda call: call.positional > count)
        means, known = "callers that pass other names (TypeError)", {*self.old, *self.new}
        return self._finding(what, "breaks", means, lambda call: not call.keywords <= known)

    def _added(self, parameter: Parameter) -> Iterator[Finding]:
        name = parameter.name
        if parameter.kind in (VAR_POSITIONAL, VAR_KEYWORD):
            if not self.before.has(parameter.kind):
                yield self._finding(f"{name} added", "harmless", "takes more than before", lambda _: False)
            return
        at = self.new_at.get(name)
        # One that no caller's position reaches shifts nobody.
        inserted = at is not None and at < len(self.old_at)
        behind = [] if at is None else [each.name for each in self.after.positions[at:] if each.name in self.old_at]
        where = "keyword only" if at is None else f"at {at}, {f'before {behind[0]}' if behind else 'last'}"
        value = "required" if parameter.required else f"={parameter.default}"
        what = f"{name} added, {value}, {where}" if parameter.required else f"{name}{value} added, {where}"

        def shifts(call: Call) -> bool:
            return at is not None and inserted and call.positional > at

        def left_out(call: Call) -> bool:
            return name not in call.keywords and not (at is not None and call.positional > at)

        if parameter.required:
            means = "callers that do not pass it (TypeError)" + (f"; {_SHIFT}" if inserted else "")
            yield self._finding(what, "breaks", means, lambda call: left_out(call) or shifts(call), name)
        elif inserted:
            yield self._finding(what, "silent", f"{_SHIFT}; {_KEEPS}", shifts, name)
        elif self.before.has(VAR_KEYWORD) or self.before.has(VAR_POSITIONAL):
            means = "callers that pass it: it went into a variadic parameter before"
            yield self._finding(what, "silent", means, lambda call: not left_out(call), name)
        else:
            means = "callers that leave it out still bind, and get its default"
            yield self._finding(what, "harmless", means, lambda _: False, name)

    def _changed(self, before: Parameter, after: Parameter) -> Iterator[Finding]:
        name = before.name
        if before.kind != after.kind:
            yield self._kind(before, after)

        def left_out(call: Call) -> bool:
            return not call.passes(self.before, name)

        if before.required and not after.required:
            yield self._finding(
                f"{name} has a default, {after.default}", "harmless", "can be left out", lambda _: False, name
            )
        elif after.required and not before.required:
            means = "callers that leave it out (TypeError)"
            what = f"{name} is required, was {before.default} by default"
            yield self._finding(what, "breaks", means, left_out, name)
        elif before.default != after.default:
            means = "callers that leave it out; those that pass it unaffected"
            yield self._finding(f"{name}={after.default}, was {before.default}", "silent", means, left_out, name)
        if before.annotation != after.annotation:
            wider = widens(before.annotation, after.annotation)
            means = "takes what it took" if wider else "whether what callers pass is still taken"
            what = f"{name}: {after.annotation or 'no annotation'}, was {before.annotation or 'without'}"
            effect = "harmless" if wider else "read"
            yield self._finding(what, effect, means, lambda call: not wider and call.passes(self.before, name), name)

    def _kind(self, before: Parameter, after: Parameter) -> Finding:
        name, what = before.name, f"{before.name} is {after.kind}, was {before.kind}"
        if after.kind == _KEYWORD_ONLY:
            means = f"positional callers (TypeError); {_KEEPS}"
            return self._finding(what, "breaks", means, lambda call: call.by_position(self.before, name), name)
        if after.kind == _POSITIONAL_ONLY or not after.positional:
            means = "keyword callers (TypeError)"
            return self._finding(what, "breaks", means, lambda call: self._keyword_breaks(call, name), name)
        return self._finding(what, "harmless", "can be passed in more ways", lambda _: False, name)

    def _moved(self, moved: dict[str, int]) -> Finding:
        steps = ", ".join(f"{name} {at} -> {self.new_at[name]}" for name, at in moved.items())
        first = min(min(at, self.new_at[name]) for name, at in moved.items())
        return self._finding(f"moved: {steps}", "silent", f"{_SHIFT}; {_KEEPS}", lambda call: call.positional > first)
