"""The quantiser: a Hugging Face folder or a GGUF file in, an EXL3 checkpoint out."""
