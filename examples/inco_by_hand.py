"""InCo Aggregation on two layers: what becomes of a deep update that agrees with the shallow one, or opposes it."""

import torch

import incofl

shallow = torch.tensor([1.0, 0.0])  # g_0: many clients hold this layer
agreeing = torch.tensor([0.6, 0.8])  # g_k of a deep layer that few clients hold
opposing = torch.tensor([-0.6, 0.8])

for name, deep in (("agreeing", agreeing), ("opposing", opposing)):
    for rule in ("released", "algorithm1", "theorem"):
        mixed = incofl.mix(deep, shallow, rule=rule, clip=None)
        x, y = (round(value, 3) + 0.0 for value in mixed.tolist())
        print(f"{name} ({deep[0]:+.1f}, {deep[1]:+.1f})  {rule:10} -> ({x:+.1f}, {y:+.1f})")
