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
    EXTRA_PACKAGES    = EXTRA_PACKAGES
    UNPACK_BY         = UNPACK_BY
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

# The GPU images differ in card and processor alone. `docker buildx bake cuda` builds all three.
target "cuda" {
  name = card.name
  matrix = {
    card = [
      {
        name          = "sm120"
        platform      = "linux/amd64"
        architectures = ARCH_SM120
        budget_mb     = BUDGET_MB_SM120
      },
      {
        name          = "sm121"
        platform      = "linux/arm64"
        architectures = ARCH_SM121
        budget_mb     = BUDGET_MB_SM121
      },
      {
        name          = "hopper"
        platform      = "linux/amd64"
        architectures = ARCH_HOPPER
        budget_mb     = BUDGET_MB_HOPPER
      },
    ]
  }
  inherits  = ["common"]
  target    = "cuda"
  platforms = [card.platform]
  tags      = ["${REGISTRY}${IMAGE}:${card.name}"]
  args = {
    FLAVOUR       = card.name
    ARCHITECTURES = card.architectures
    VLLM          = VLLM_CUDA
    LOCK          = "cuda"
    CUDA          = CUDA
    DRIVER_MIN    = DRIVER_MIN
    BUDGET_MB     = card.budget_mb
  }
}
