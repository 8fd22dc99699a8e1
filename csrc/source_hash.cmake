# Writes OUTPUT, a header with the SHA-256 over everything that goes into the CUDA kernels of ROOT:
# names and contents, in the order of the names. The file is left alone when nothing changed.
file(GLOB sources ${ROOT}/csrc/format/* ${ROOT}/csrc/device/* ${ROOT}/csrc/linear/*
     ${ROOT}/csrc/moe/* ${ROOT}/csrc/ops/cuda_* ${ROOT}/csrc/ops/moe_problem.h
     ${ROOT}/csrc/ops/stream.h)
list(SORT sources)
set(listing "")
foreach(source IN LISTS sources)
  file(SHA256 ${source} digest)
  file(RELATIVE_PATH name ${ROOT} ${source})
  string(APPEND listing "${name} ${digest}\n")
endforeach()
string(SHA256 total "${listing}")
file(CONFIGURE OUTPUT ${OUTPUT} CONTENT "#define EXL3_SOURCE_HASH \"${total}\"\n" @ONLY)
# The command that made it must be seen to have run.
file(TOUCH ${OUTPUT})
