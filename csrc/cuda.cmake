# The CUDA kernels: target _C_cuda, from csrc/linear, csrc/moe and csrc/ops/cuda_*.cpp.
#
# nvcc is called by plain commands. CMake's own CUDA language wants a whole toolkit, and what people
# have is often only the compiler: NVIDIA's PyPI wheels (requirements/kernels.txt) hold no lib64 and
# no version file, and compile all the same. One command makes one object with every architecture
# inside; the sources are one per rate, so ninja has enough to spread.
#
# The library needs no GPU and no CUDA build of torch to compile, and no libcudart to run: the runtime
# is linked statically and stays hidden, and torch's streams are the driver's own handles.

set(EXL3_CUDA AUTO CACHE STRING "ON: build the CUDA kernels. OFF: leave them out. AUTO: where there \
is nvcc 13, offer the target _C_cuda, but leave it out of the default build, which it would make \
some minutes longer")
set(EXL3_CUDA_ARCHITECTURES "80;86;89;90;120+PTX;121" CACHE STRING
    "Compute capabilities times ten; +PTX adds portable code that newer devices compile at load")
set(EXL3_NVCC_FLAGS "" CACHE STRING "More flags for nvcc, for example -lineinfo")
set(EXL3_NVCC_THREADS 1 CACHE STRING
    "Architectures that one nvcc compiles at a time; ninja already runs one nvcc a core")
set(EXL3_CUDA_LIBRARY "" CACHE FILEPATH "A _C_cuda.so built before: install it, build none")

if(EXL3_CUDA_LIBRARY)
  if(NOT EXISTS ${EXL3_CUDA_LIBRARY})
    message(FATAL_ERROR "EXL3_CUDA_LIBRARY names ${EXL3_CUDA_LIBRARY}, and there is no such file; "
                        "scripts/build-kernels builds one")
  endif()
  install(FILES ${EXL3_CUDA_LIBRARY} DESTINATION exl3_plugin)
  return()
endif()
if(NOT EXL3_CUDA)
  return()
endif()

# A reason why the kernels cannot be built: an error where they were asked for.
macro(exl3_without_cuda)
  if(EXL3_CUDA STREQUAL "AUTO")
    message(STATUS "No CUDA kernels: " ${ARGN})
    return()
  endif()
  message(FATAL_ERROR "EXL3_CUDA=${EXL3_CUDA}, but " ${ARGN}
                      " scripts/build-kernels brings a compiler of its own")
endmacro()

find_program(EXL3_NVCC nvcc HINTS ENV CUDA_HOME PATHS /usr/local/cuda ${Python_SITELIB}/nvidia/cu13
             PATH_SUFFIXES bin)
if(NOT EXL3_NVCC)
  exl3_without_cuda("there is no nvcc on PATH, in CUDA_HOME or in /usr/local/cuda.")
endif()
# A dry run names the toolkit's folder, also where nvcc is a script that calls the real one.
execute_process(COMMAND ${EXL3_NVCC} --version OUTPUT_VARIABLE nvcc_version ERROR_VARIABLE nvcc_error)
execute_process(COMMAND ${EXL3_NVCC} --dryrun -x cu -c /dev/null -o null.o
                OUTPUT_QUIET ERROR_VARIABLE nvcc_plan)
if(NOT nvcc_version MATCHES "V([0-9]+\\.[0-9]+\\.[0-9]+)" OR NOT nvcc_plan MATCHES "TOP=([^\n]+)")
  exl3_without_cuda("${EXL3_NVCC} does not run: ${nvcc_error}")
endif()
string(REGEX REPLACE ".*V([0-9]+\\.[0-9]+\\.[0-9]+).*" "\\1" nvcc_version "${nvcc_version}")
string(REGEX REPLACE ".*TOP=([^\n]+).*" "\\1" cuda_root "${nvcc_plan}")
get_filename_component(cuda_root "${cuda_root}" REALPATH)
if(nvcc_version VERSION_LESS 13.0)
  exl3_without_cuda("${EXL3_NVCC} is version ${nvcc_version}, and sm_121 needs 13.0 or newer.")
endif()
# Cross-compiling takes the runtime and its headers from the target's toolkit, the compiler from ours.
set(EXL3_CUDA_TARGET "" CACHE PATH "Toolkit (include, lib) of the processor that is compiled for")
set(runtime_root ${cuda_root})
if(EXL3_CUDA_TARGET)
  set(runtime_root ${EXL3_CUDA_TARGET})
elseif(CMAKE_CROSSCOMPILING)
  exl3_without_cuda("EXL3_CUDA_TARGET names no toolkit for ${CMAKE_SYSTEM_PROCESSOR}.")
endif()
find_library(EXL3_CUDART libcudart_static.a NO_DEFAULT_PATH NO_CMAKE_FIND_ROOT_PATH
             HINTS ${runtime_root}
             PATH_SUFFIXES lib64 lib targets/${CMAKE_SYSTEM_PROCESSOR}-linux/lib
                           targets/sbsa-linux/lib)
find_path(EXL3_CUDA_INCLUDE cuda_runtime.h NO_DEFAULT_PATH NO_CMAKE_FIND_ROOT_PATH
          HINTS ${runtime_root}
          PATH_SUFFIXES include targets/${CMAKE_SYSTEM_PROCESSOR}-linux/include
                        targets/sbsa-linux/include)
if(NOT EXL3_CUDART OR NOT EXL3_CUDA_INCLUDE)
  exl3_without_cuda("${runtime_root} lacks libcudart_static.a or cuda_runtime.h.")
endif()

file(GLOB cuda_kernels CONFIGURE_DEPENDS csrc/linear/*.cu csrc/moe/*.cu)
file(GLOB cuda_sources CONFIGURE_DEPENDS csrc/linear/*.cpp csrc/moe/*.cpp csrc/ops/cuda_*.cpp)
if(NOT cuda_kernels)
  exl3_without_cuda("csrc/linear holds no kernels.")
endif()

set(gencode "")
set(cubins "")
set(ptx "")
foreach(entry IN LISTS EXL3_CUDA_ARCHITECTURES)
  if(NOT entry MATCHES "^([0-9]+)(\\+PTX)?$")
    message(FATAL_ERROR "EXL3_CUDA_ARCHITECTURES has ${entry}; entries look like 90 or 120+PTX")
  endif()
  set(arch ${CMAKE_MATCH_1})
  # The host asks for dependent launch by the card; code compiled for older ones would not wait. And
  # code for 9.0 is for that architecture alone: its own instructions, its own choice of instances.
  if(CMAKE_MATCH_2 AND arch LESS 100)
    message(FATAL_ERROR "EXL3_CUDA_ARCHITECTURES has ${entry}; portable code begins with 100+PTX, "
                        "because what is compiled for older cards does not run on newer ones")
  endif()
  list(APPEND cubins ${arch})
  if(CMAKE_MATCH_2)
    list(APPEND ptx ${arch})
    list(APPEND gencode -gencode "arch=compute_${arch},code=[sm_${arch},compute_${arch}]")
  else()
    set(target ${arch})
    if(arch EQUAL 90)
      set(target 90a)  # wgmma
    endif()
    list(APPEND gencode -gencode arch=compute_${target},code=sm_${target})
  endif()
endforeach()
separate_arguments(nvcc_flags UNIX_COMMAND "${EXL3_NVCC_FLAGS}")
list(PREPEND nvcc_flags -std=c++20 -O3 --expt-relaxed-constexpr --compress-mode=size
     -Xcompiler=-fPIC,-fvisibility=hidden -ccbin ${CMAKE_CXX_COMPILER} -I ${CMAKE_SOURCE_DIR}/csrc
     --threads ${EXL3_NVCC_THREADS})
if(EXL3_CUDA_TARGET)
  # nvcc knows only its own toolkit for its own processor; with another one it names no folder at all.
  # A few headers belong to the compiler and are not in the target's packages.
  list(APPEND nvcc_flags -isystem ${EXL3_CUDA_INCLUDE} -isystem ${cuda_root}/include)
endif()

set(cuda_objects "")
foreach(source IN LISTS cuda_kernels)
  get_filename_component(name ${source} NAME)
  set(object ${CMAKE_BINARY_DIR}/cuda/${name}.o)
  list(APPEND cuda_objects ${object})
  add_custom_command(
    OUTPUT ${object}
    COMMAND ${EXL3_NVCC} ${nvcc_flags} ${gencode} -MD -MT ${object} -MF ${object}.d
            -c ${source} -o ${object}
    DEPENDS ${source}
    DEPFILE ${object}.d
    COMMENT "nvcc ${name}"
    VERBATIM)
endforeach()
file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/cuda)

# A calibration belongs to the kernels it measured, so the library knows their sources.
file(GLOB hashed CONFIGURE_DEPENDS csrc/format/* csrc/device/* csrc/linear/* csrc/moe/*
     csrc/ops/cuda_* csrc/ops/moe_problem.h csrc/ops/stream.h)
set(build_info ${CMAKE_BINARY_DIR}/cuda/exl3_source_hash.h)
add_custom_command(
  OUTPUT ${build_info}
  COMMAND ${CMAKE_COMMAND} -DOUTPUT=${build_info} -DROOT=${CMAKE_SOURCE_DIR}
          -P ${CMAKE_SOURCE_DIR}/csrc/source_hash.cmake
  DEPENDS ${hashed} ${CMAKE_SOURCE_DIR}/csrc/source_hash.cmake
  COMMENT "hash of the kernel sources"
  VERBATIM)
string(REPLACE ";" "," cubins "${cubins}")
string(REPLACE ";" "," ptx "${ptx}")
set_source_files_properties(csrc/ops/cuda_build.cpp PROPERTIES
  OBJECT_DEPENDS ${build_info} INCLUDE_DIRECTORIES ${CMAKE_BINARY_DIR}/cuda
  COMPILE_DEFINITIONS
  "EXL3_ARCHITECTURES=\"${cubins}\";EXL3_PTX=\"${ptx}\";EXL3_NVCC_VERSION=\"${nvcc_version}\"")

# The CPU build of torch has no libtorch_cuda.so to link to. Its name is all that is needed: torch has
# loaded the real one by the time this library is.
file(WRITE ${CMAKE_BINARY_DIR}/cuda/stub.cpp "")
add_library(torch_cuda_stub SHARED EXCLUDE_FROM_ALL ${CMAKE_BINARY_DIR}/cuda/stub.cpp)
set_target_properties(torch_cuda_stub PROPERTIES OUTPUT_NAME torch_cuda
                      LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/cuda)

add_library(_C_cuda MODULE ${cuda_sources} ${cuda_objects} ${build_info})
set_source_files_properties(${cuda_objects} PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
set_target_properties(_C_cuda PROPERTIES PREFIX "" OUTPUT_NAME "_C_cuda"
                      CXX_VISIBILITY_PRESET hidden BUILD_WITH_INSTALL_RPATH TRUE)
target_include_directories(_C_cuda PRIVATE csrc)
target_include_directories(_C_cuda SYSTEM PRIVATE ${TORCH_DIR}/include ${EXL3_CUDA_INCLUDE})
target_compile_definitions(_C_cuda PRIVATE TORCH_TARGET_VERSION=0x020a000000000000 USE_CUDA)
target_compile_options(_C_cuda PRIVATE -O3 -Wall -Wextra)
target_link_options(_C_cuda PRIVATE -Wl,--no-as-needed -Wl,--exclude-libs,ALL)
target_link_libraries(_C_cuda PRIVATE
  ${torch_libraries} torch_cuda_stub ${EXL3_CUDART} dl pthread rt)

if(EXL3_CUDA STREQUAL "AUTO")
  set_target_properties(_C_cuda PROPERTIES EXCLUDE_FROM_ALL TRUE)
else()
  install(TARGETS _C_cuda LIBRARY DESTINATION exl3_plugin)
endif()
message(STATUS "CUDA kernels (${EXL3_CUDA}): nvcc ${nvcc_version} in ${cuda_root}, "
               "${EXL3_CUDA_ARCHITECTURES}")
