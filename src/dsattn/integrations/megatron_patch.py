"""What is changed in Megatron's namespaces: a few functions that ask, at each call, what is switched on."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from dsattn.errors import ContractDrift
from dsattn.functional.call import Choice, is_observed
from dsattn.integrations import megatron_observer, megatron_scorer
from dsattn.integrations.megatron_module import (
    ATTEND,
    HELD,
    LOADER,
    MANY_DOCUMENTS,
    ONE_DOCUMENT,
    SELECT,
    Kernels,
    Names,
)
from dsattn.integrations.megatron_namespace import RepairedNamespace, inner_of
from dsattn.integrations.megatron_probe import is_fixed

LOCK = threading.RLock()
"""Held while Megatron's namespaces are changed."""

_NEEDS: Mapping[str, tuple[str, ...]] = {
    SELECT: megatron_scorer.SELECT_NEEDS,
    ONE_DOCUMENT: megatron_scorer.ONE_DOCUMENT_NEEDS,
    MANY_DOCUMENTS: megatron_scorer.MANY_DOCUMENTS_NEEDS,
    ATTEND: megatron_observer.ATTEND_NEEDS,
}


class Patch:
    """The changes to one Megatron; nothing is changed until something is switched on.

    A replaced function that someone holds on to is the original again once its part is switched off.

    Args:
        kernels: Megatron's functions.

    Attributes:
        fixed: whether this Megatron needs no repair of its calls.
        repairs: whether the frontend's DSA is wrapped.
        scores: what computes the selections of packed context-parallel rows; None for Megatron's own.
        captures: how many captures are running.
    """

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.fixed = is_fixed(kernels.names)
        self.repairs = False
        self.scores: Choice | None = None
        self.captures = 0
        self._slots: dict[str, tuple[Names, Callable[..., Any], Callable[..., Any]]] = {}
        self._windows = threading.local()

    def apply(self) -> None:
        """Brings Megatron's namespaces to what is switched on.

        Raises:
            ContractDrift: a function that has to be replaced is another one than that of release 0.19; nothing changed.
        """
        scores, sees = self.scores is not None, self.captures > 0
        wanted = {
            LOADER: (self.repairs, self._loader),
            SELECT: (scores or sees, self._selecting),
            ONE_DOCUMENT: (scores, self._one_document),
            MANY_DOCUMENTS: (scores, self._many_documents),
            ATTEND: (sees, self._attending),
        }
        with LOCK:
            new = [name for name, (on, _) in wanted.items() if on and name not in self._slots]
            homes = {name: self._home(name) for name in new}
            for name in new:
                original = homes[name][name]
                mine = wanted[name][1](original)
                self._slots[name] = (homes[name], original, mine)
                homes[name][name] = mine
            for name in [name for name in self._slots if not wanted[name][0]]:
                names, original, mine = self._slots.pop(name)
                # What someone else has put in its place since then stays, and calls a function that does nothing more.
                if names.get(name) is mine:
                    names[name] = original
            self._hold()

    def _home(self, name: str) -> Names:
        if name == LOADER:
            return self.kernels.names
        names = self.kernels.home(name)
        missing = [each for each in _NEEDS[name] if each not in inspect.signature(names[name]).parameters]
        if missing:
            given = f"{name} without {', '.join(missing)}"
            raise ContractDrift(str(self.kernels), given=given, needed="the functions of release 0.19")
        return names

    def _hold(self) -> None:
        """Wraps or unwraps the DSA that Megatron holds at the moment."""
        names = self.kernels.names
        with LOCK:
            held = names.get(HELD)
            if self.repairs and held is not None and not isinstance(held, RepairedNamespace):
                names[HELD] = RepairedNamespace(held, lambda: self.repairs)
            elif not self.repairs and isinstance(held, RepairedNamespace):
                names[HELD] = inner_of(held)

    def _loader(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def load(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if self.repairs and not isinstance(self.kernels.names.get(HELD), RepairedNamespace):
                self._hold()
            return result

        return load

    def _selecting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @wraps(original)
        def select(*args: Any, **kwargs: Any) -> Any:
            sees = self.captures > 0 and is_observed()
            if self.scores is None and not sees:
                return original(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            before = getattr(self._windows, "given", None)
            self._windows.given = bound.arguments["varlen_starts"], bound.arguments["varlen_ends"]
            try:
                result = original(*args, **kwargs)
            finally:
                self._windows.given = before
            if sees:
                megatron_observer.tell_selection(bound.arguments)
            return result

        return select

    def _one_document(self, original: Callable[..., Any]) -> Callable[..., Any]:
        return self._scorer(original, lambda _: getattr(self._windows, "given", None))

    def _many_documents(self, original: Callable[..., Any]) -> Callable[..., Any]:
        return self._scorer(original, lambda arguments: (arguments["starts"], arguments["ends"]))

    def _scorer(
        self, original: Callable[..., Any], windows: Callable[[Mapping[str, Any]], tuple[Any, Any] | None]
    ) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @wraps(original)
        def score(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs).arguments
            starts, ends = windows(arguments) or (None, None)
            if self.scores is None or starts is None or ends is None or arguments["q_bshd"].shape[0] != 1:
                return original(*args, **kwargs)
            k = arguments["k_bshd"]
            layout = megatron_scorer.layout_of(starts, ends, k.shape[1])
            top_k, wants_scores = int(arguments["topk_k"]), bool(arguments["return_topk_scores"])
            return megatron_scorer.select(
                arguments["q_bshd"], k, arguments["w_bsh"], layout, top_k, wants_scores, self.scores
            )

        return score

    def _attending(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @wraps(original)
        def attend(*args: Any, **kwargs: Any) -> Any:
            if self.captures > 0 and is_observed():
                bound = signature.bind(*args, **kwargs)
                bound.apply_defaults()
                megatron_observer.tell_attention(bound.arguments)
            return original(*args, **kwargs)

        return attend
