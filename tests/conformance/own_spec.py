"""A layer spec as users give it to --spec: an object in a module of their own."""

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

layer = get_gpt_layer_local_spec()
