"""The drop-in class for llama_cpp.Llama, its completions, and the turns that calls from several threads take."""

from racer_local.llm.drop_in import Llama

__all__ = ["Llama"]
