"""ALP's noise, as the code that `trimtab explain` prints.

The trainer's own implementation, `trainer/models/perturbation.py`, has packed rows and a float32 residual stream.
"""

import torch


def perturb(layers: torch.nn.ModuleList, log_sigma: torch.Tensor, seed: int) -> list[torch.utils.hooks.RemovableHandle]:
    """Adds sigma_l * eps_l to the input of every decoder layer l, eps_l ~ N(0, I), until the handles are removed.

    Only for the forward whose log-probs are `current`, and its backward: all other forwards have no noise.
    log_sigma: (layers,) a parameter, log 1e-4 at first, with a learning rate of its own (5e-4), without decay, and left
        out of the gradient clip.
    seed: another one for each update and micro-batch; activations that are recomputed get the same noise.
    Not printed: a float32 residual stream, without which bfloat16 rounds most of the noise away.
    """
    handles = []
    for index, layer in enumerate(layers):

        def add(_layer, inputs, index=index):
            hidden = inputs[0]
            generator = torch.Generator(hidden.device).manual_seed(seed * len(layers) + index)
            noise = torch.randn(hidden.shape, generator=generator, device=hidden.device, dtype=hidden.dtype)
            return (hidden + log_sigma[index].exp() * noise, *inputs[1:])

        handles.append(layer.register_forward_pre_hook(add))
    return handles
