"""Answer one prompt and show what drafting did: python examples/generate.py MODEL.gguf "your prompt"."""

import sys

from racer_local import ContextConfig, DraftConfig, Model
from racer_local.llama import render_chat
from racer_local.session import Session

path, text = sys.argv[1], sys.argv[2]
with Model(path) as model, Session(model, ContextConfig(n_ctx=2048), DraftConfig(draft="racer")) as session:
    prompt = render_chat(model, [{"role": "user", "content": text}])
    answer = session.answer(prompt, max_tokens=200, on_text=lambda t: print(t, end="", flush=True))
print("\n", answer.stats.as_dict())
