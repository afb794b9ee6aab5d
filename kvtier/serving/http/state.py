"""What Transformers' app holds of models: here one, which one engine runs."""

from __future__ import annotations

from typing import Any

from transformers.cli.serving.utils import GenerationState

from kvtier.serving.http.manager import EngineManager


class State(GenerationState):
    """All requests go to one engine.

    Args:
        manager: of it.
    """

    def __init__(self, manager: EngineManager) -> None:
        super().__init__(continuous_batching=True)
        self._manager = manager

    def use_continuous_batching(self, model: Any, modality: Any) -> bool:
        """They do."""
        return True

    def get_manager(self, model_id: str, use_cb: bool = False) -> EngineManager:
        """See `GenerationState`."""
        return self._manager

    def is_cb_alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self._manager.alive

    def shutdown(self) -> None:
        """The server ends its engine itself."""
