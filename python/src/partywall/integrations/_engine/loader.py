"""A loader of models, whatever the engine. Importing this module imports neither torch nor an engine."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import partywall as pw
from partywall.integrations._engine.errors import unsupported
from partywall.integrations._engine.settings import LAYOUT, PROCESSED, Settings

Fill = Callable[[Any, Callable[[], None]], None]
"""Fills a model that an engine is making. The second argument reads the checkpoint into it, in the ordinary way."""


@dataclass(frozen=True)
class Wanted:
    """What an engine asks for."""

    name: str
    """The name of the rank's weights."""
    fingerprint: dict[str, str]
    """What must agree with the weights in shared memory."""
    device: Any
    """The torch device of the engine."""
    why_copy: str | None
    """Why the engine must have weights of its own, whatever the model; `None` if it may map them."""
    sleeps: bool
    """Whether the engine may give the memory of its weights back, and ask for it again."""


class SharedLoader:
    """Loads a model once for all engines that ask for its name.

    The first engine builds: it loads the checkpoint with an ordinary loader, and publishes the weights under a name
    that is kept. If it dies or fails before that, the next one builds. The weights have one of two layouts, which the
    name says:

    * *processed*: as the engine uses them, after it has fused, quantized and repacked them. The parameters of the
      builder lie in the shared memory, and other engines map it.
    * *loaded*: as the ordinary loader leaves them, in host memory. Each engine copies them and processes its copy. This
      is for layers whose processed weights cannot come from elsewhere.

    `model_loader_extra_config` has the fields of `Settings`. A loader for an engine says how its models are made; the
    `arguments` are those of its `load_model`.
    """

    _settings: Settings

    def _make(self, fill: Fill, *arguments: Any) -> Any:
        """Has the engine make a model, fill it and process its weights."""
        raise NotImplementedError

    def _make_on_meta(self, *arguments: Any) -> Any:
        """Has the engine make a model without memory, for weights that are processed. Raises `UnsupportedModel` if it
        cannot take those."""
        raise NotImplementedError

    def _finish(self, model: Any, segment: pw.Segment, private: bool, *arguments: Any) -> None:
        """Does what is left for a model that has got its processed weights."""
        raise NotImplementedError

    def _reason_of(self, model: Any, *arguments: Any) -> str | None:
        """Returns why processed weights of a model cannot be shared, which is only loaded so far; `None` if they can.

        Raises `UnsupportedModel` if they are to be.
        """
        raise NotImplementedError

    def _check_processed(self, model: Any) -> None:
        """Raises `UnsupportedModel` if the processed weights of a model cannot be shared after all."""

    def _copied(self, model: Any) -> None:
        """Is called when a model has got a copy of loaded weights, in place of reading the checkpoint."""

    def _share(self, wanted: Wanted, *arguments: Any) -> Any:
        """Returns the model, with weights that it shares or copies."""
        built: list[Any] = []

        with self._settings.connect() as domain:

            def build(_: pw.Claim) -> pw.Segment:
                model, segment = self._build(domain, wanted, *arguments)
                built.append(model)
                return segment

            segment = domain.open_or_build(wanted.name, build, timeout=self._settings.timeout)
            if built:
                return built[0]
            return self._take(domain, segment, wanted, *arguments)

    def _build(self, domain: pw.Domain, wanted: Wanted, *arguments: Any) -> tuple[Any, pw.Segment]:
        """Loads the model with the ordinary loader, and publishes its weights."""
        from partywall.integrations._engine import weights

        published: list[pw.Segment] = []
        filled: set[str] = set()

        def fill(model: Any, read: Callable[[], None]) -> None:
            read()
            reason = wanted.why_copy or self._reason_of(model, *arguments)
            if reason is None:
                filled.update(weights.names_with_data(model))
                return
            _log.warning("each engine copies the weights of %s: %s", wanted.name, reason)
            published.append(weights.share_loaded(model, wanted.name, domain, wanted.fingerprint))

        model = self._make(fill, *arguments)
        if not published:
            weights.check_kept(model, filled)
            self._check_processed(model)
            published.append(weights.share_processed(model, wanted.name, domain, wanted.fingerprint, wanted.sleeps))
        return model, published[0]

    def _take(self, domain: pw.Domain, segment: pw.Segment, wanted: Wanted, *arguments: Any) -> Any:
        """Returns a model with the weights of a segment, which is closed when they are not needed any more."""
        from partywall.integrations._engine import weights

        try:
            weights.check_fingerprint(segment, wanted.fingerprint)
            if segment.metadata.get(LAYOUT) == PROCESSED:
                return self._map(domain, segment, wanted, *arguments)
            if self._settings.mode == "shared":
                raise unsupported(
                    f"cannot map the weights of {segment.name!r}: they are not processed yet, and have to be copied",
                    "use mode 'auto' or 'copy', or choose another name",
                )

            def fill(model: Any, _: Callable[[], None]) -> None:
                weights.copy_loaded(model, segment)
                self._copied(model)

            with segment:
                return self._make(fill, *arguments)
        except BaseException:
            segment.close()
            raise

    def _map(self, domain: pw.Domain, segment: pw.Segment, wanted: Wanted, *arguments: Any) -> Any:
        """Returns a model whose parameters are processed weights, in place if the engine may map them."""
        from partywall.integrations._engine import weights

        private = wanted.why_copy is not None
        if wanted.device.type == "cuda":
            with segment:
                # Says so if the memory is on another GPU than the engine.
                segment = domain.open(segment.name, version=segment.version, device=wanted.device)
        try:
            model = self._make_on_meta(*arguments)
            copied = weights.install(model, segment, private)
            self._finish(model, segment, private, *arguments)
            weights.check_complete(model)
            weights.hold(model, segment, copied, private)
        except BaseException:
            segment.close()
            raise
        return model.eval()


_log = logging.getLogger(__name__)
