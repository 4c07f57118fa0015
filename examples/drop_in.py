"""One changed import, and the same calls answer faster: python examples/drop_in.py [MODEL.gguf]

Without a model it fetches SmolLM2-135M (98 MB, once).
"""

import sys

from racer_local import Llama  # was: from llama_cpp import Llama
from racer_local.models import fetch

TEXT = """The orchard has forty apple trees. In spring the orchard is white with blossom. In summer the apples grow.
In autumn we pick the apples, and in winter we cut the branches of the apple trees."""

llm = Llama(str(sys.argv[1] if len(sys.argv) > 1 else fetch("smollm2-135m")), n_ctx=2048, verbose=False)
messages = [{"role": "user", "content": f"Write this text again, with pears in place of apples:\n\n{TEXT}"}]

for racer in (False, True):
    llm.forget()  # both start with an empty cache
    answer = llm.create_chat_completion(messages, max_tokens=120, temperature=0, racer=racer)
    stats = llm.last_stats
    print(answer["choices"][0]["message"]["content"].strip())
    print(f"--- {stats['draft']}: {stats['tokens_per_second']:.0f} tokens/s, MAT {stats['mean_accepted_tokens']:.2f}\n")
llm.close()
