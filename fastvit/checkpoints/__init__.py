"""Load existing weights into a `VisionTransformer`: files of timm, Hugging Face transformers, Meta's DINOv2,
DINOv3, MAE and Perception Encoder, OpenAI's CLIP and open_clip.

A file is data here, never code: of safetensors, or of torch.save through torch's restricted unpickler. Its content says
which of them it is, not its name. A compressed file that would inflate to more than 1 GiB and four times its size is
refused (torch.save compresses nothing). All of it is checked against the model before anything is copied: the model
ends up with every weight or with none.

A state_dict carries no configuration. Activation and LayerNorm's eps are the model's arguments: Hugging Face's CLIP and
OpenAI's need act_layer="quick_gelu" (the zoo's `*_clip_quickgelu_*`), Hugging Face's SigLIP "gelu_tanh", and
Hugging Face's ViT and DeiT norm_layer=partial(LayerNorm, eps=1e-12).
"""

from fastvit.checkpoints.files import CheckpointError, read
from fastvit.checkpoints.loading import load

__all__ = ["CheckpointError", "load", "read"]
