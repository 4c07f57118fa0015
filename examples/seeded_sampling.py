"""A seed gives the same answer with drafts on and off, to the token: python examples/seeded_sampling.py [MODEL.gguf]

`exact` chooses settings in which a batch of rows equals single ones to the bit, and keeps trees within that.
"""

import sys

from racer_local import Llama
from racer_local.models import fetch

path = str(sys.argv[1] if len(sys.argv) > 1 else fetch("smollm2-135m"))
llm = Llama(path, n_ctx=2048, verbose=False, racer={"exact": True})
prompt = "A list of ten animals and where they live:\n1. The fox lives in the forest.\n2."

for seed in (1, 2):
    plain, drafted = (
        llm(prompt, max_tokens=60, temperature=0.8, seed=seed, racer=racer)["choices"][0]["text"]
        for racer in (False, True)
    )
    print(f"seed {seed}:{drafted}\n--- the same text without drafts: {drafted == plain}\n")
    assert drafted == plain
print("the largest tree that changes nothing here:", llm.last_stats["row_limit"], "nodes")
llm.close()
