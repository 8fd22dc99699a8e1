"""EXL3 models in vLLM: the quantisation plugin, its numpy oracle and its quantiser."""

__version__ = "0.1.0"

_registered = False


def register() -> None:
    """Entry point of group `vllm.general_plugins`: makes vLLM know `quant_method: exl3`.

    vLLM calls it once in every process (front end, engine, workers, model inspection), so it is
    idempotent, imports no compiled code and touches no device.
    """
    global _registered
    if _registered:
        return

    from vllm.model_executor.layers.quantization import register_quantization_config

    from exl3_plugin.config import Exl3Config

    register_quantization_config("exl3")(Exl3Config)
    _registered = True
