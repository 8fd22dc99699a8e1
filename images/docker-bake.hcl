# The images, for docker buildx bake. All versions and digests stand in versions.json; what depends on
# the checkout (PLUGIN, SOURCE_HASH, REVISION...) comes in by environment:
#
#   eval "$(scripts/build-images --environment)"
#   docker buildx bake -f images/versions.json -f images/docker-bake.hcl sm120
#
# scripts/build-images reads the same two files and drives plain `docker build`, for machines without
# buildx or without a registry.

group "default" {
  targets = ["cpu", "sm120", "sm121", "hopper"]
}

target "common" {
  context    = "."
  dockerfile = "images/Dockerfile"
  args = {
    BASE_IMAGE        = BASE_IMAGE
    BUILDER_IMAGE     = BUILDER_IMAGE
    TORCH_HEADERS     = TORCH_HEADERS
    GLIBC             = GLIBC
    SOURCE_DATE_EPOCH = SOURCE_DATE_EPOCH
    PLUGIN            = PLUGIN
    SOURCE_HASH       = SOURCE_HASH
    REVISION          = REVISION
    SOURCE            = SOURCE
    CREATED           = CREATED
  }
  # Both attestations go into the manifest that buildx pushes; scripts/build-images writes its own
  # SBOM, because plain docker cannot.
  attest = ["type=sbom", "type=provenance,mode=max"]
}

target "cpu" {
  inherits  = ["common"]
  target    = "cpu"
  platforms = ["linux/amd64", "linux/arm64"]
  tags      = ["${REGISTRY}${IMAGE}:cpu"]
  args = {
    FLAVOUR       = "cpu"
    VLLM          = VLLM_CPU
    LOCK          = "cpu"
    ARCHITECTURES = "none"
    CUDA          = "none"
    DRIVER_MIN    = "none"
    BUDGET_MB     = BUDGET_MB_CPU
  }
}

target "cuda" {
  inherits = ["common"]
  target   = "cuda"
  args = {
    VLLM       = VLLM_CUDA
    LOCK       = "cuda"
    CUDA       = CUDA
    DRIVER_MIN = DRIVER_MIN
  }
}

target "sm120" {
  inherits  = ["cuda"]
  platforms = ["linux/amd64"]
  tags      = ["${REGISTRY}${IMAGE}:sm120"]
  args = {
    FLAVOUR       = "sm120"
    ARCHITECTURES = ARCH_SM120
    BUDGET_MB     = BUDGET_MB_SM120
  }
}

target "sm121" {
  inherits  = ["cuda"]
  platforms = ["linux/arm64"]
  tags      = ["${REGISTRY}${IMAGE}:sm121"]
  args = {
    FLAVOUR       = "sm121"
    ARCHITECTURES = ARCH_SM121
    BUDGET_MB     = BUDGET_MB_SM121
  }
}

target "hopper" {
  inherits  = ["cuda"]
  platforms = ["linux/amd64"]
  tags      = ["${REGISTRY}${IMAGE}:hopper"]
  args = {
    FLAVOUR       = "hopper"
    ARCHITECTURES = ARCH_HOPPER
    BUDGET_MB     = BUDGET_MB_HOPPER
  }
}
