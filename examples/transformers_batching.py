"""Shows continuous batching of transformers that follows a trainer, with the versions of outputs.

pip install torch==2.13.0 -e '.[transformers]'  # once it is released: 'aiosync[transformers]'
python examples/transformers_batching.py
"""

import threading
import time

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation import ContinuousBatchingConfig

import aiosync.sync
from aiosync.integrations.transformers import ContinuousBatchingReceiver

UPDATES = 20


def make_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    return LlamaForCausalLM(config)


def train(trainer: aiosync.sync.TCPWeightSyncScheme, policy: torch.nn.Module) -> None:
    with trainer:
        trainer.connect()
        for _ in range(UPDATES):
            with torch.no_grad():
                for each in policy.parameters():
                    each.add_(0.01 * torch.randn_like(each))
            trainer.send()
            time.sleep(0.1)


def main() -> None:
    policy, model = make_model(), make_model()
    trainer = aiosync.sync.TCPWeightSyncScheme("tcp://127.0.0.1:0")
    trainer.init_on_sender(model=policy)
    training = threading.Thread(target=train, args=(trainer, policy))

    greedy = GenerationConfig(max_new_tokens=50, do_sample=False, eos_token_id=-1, pad_token_id=0)
    # Without these figures the cache takes a share of all memory.
    cache = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=128)
    manager = model.init_continuous_batching(greedy, cache)
    manager.start()
    manager.add_request([1, 2, 3, 4])  # the first request takes longer
    manager.get_result(timeout=60)
    training.start()
    scheme = aiosync.sync.TCPWeightSyncScheme(trainer.address)
    with ContinuousBatchingReceiver(scheme, manager) as receiver:
        spans, tokens = [], 0
        while training.is_alive():
            manager.add_request([1, 2, 3, 4])
            output = manager.get_result(timeout=60)
            span = receiver.span_of(output)
            assert sum(count for _, count in span.runs) == len(output.generated_tokens)
            spans.append(span)
            tokens += len(output.generated_tokens)
        training.join()
    manager.stop()
    several = sum(span.first < span.last for span in spans)
    print(f"the manager has version {receiver.version}")
    print(f"{len(spans)} outputs, {several} of them of several versions, {tokens} tokens")
    same = zip(policy.parameters(), model.parameters(), strict=True)
    print(f"the same weights on both sides: {all(torch.equal(*pair) for pair in same)}")


if __name__ == "__main__":
    main()
