"""Tools for tests, ours and yours: Megatron without CUDA (`cpu`), and a pool of ranks on one machine (`ranks`)."""
