# GPUs: included only with -DKVLOOM_CUDA=ON. Needs a CUDA toolkit (headers and nvcc) to build, and neither a GPU nor a driver: libcuda.so.1 is
# looked up at run time (src/transport/cuda/driver.h), so nothing of CUDA is linked.
# kvloom_cuda(target): compiles src/transport/cuda/*.cu to one fat binary each and embeds them; x.cu gives
#   extern const unsigned char kvloom_x_fatbin[];  // in no namespace; for cuModuleLoadData
# By a custom command rather than enable_language(CUDA): device code only, no host half, no CUDA runtime, one object for any compiler of ours.
find_package(CUDAToolkit 12.0 QUIET)
if(NOT CUDAToolkit_FOUND OR NOT CUDAToolkit_NVCC_EXECUTABLE)
  message(FATAL_ERROR "KVLOOM_CUDA=ON needs the CUDA toolkit, 12.0 or newer (nvcc and cuda.h): install it (Debian: cuda-nvcc-13-0 and "
                      "cuda-cudart-dev-13-0 of NVIDIA's repository), say where it is by -DCUDAToolkit_ROOT=/usr/local/cuda, or build with "
                      "-DKVLOOM_CUDA=OFF")
endif()
find_path(KVLOOM_CUDA_INCLUDE cuda.h HINTS ${CUDAToolkit_INCLUDE_DIRS} NO_DEFAULT_PATH)
if(NOT KVLOOM_CUDA_INCLUDE)
  message(FATAL_ERROR "KVLOOM_CUDA=ON: ${CUDAToolkit_NVCC_EXECUTABLE} is there, but no cuda.h in ${CUDAToolkit_INCLUDE_DIRS}")
endif()

# Machine code for A100 and H100/H200, and PTX that the driver compiles for what is newer.
set(KVLOOM_CUDA_CODE "arch=compute_80,code=sm_80;arch=compute_90,code=sm_90;arch=compute_90,code=compute_90" CACHE STRING
    "What the GPU kernels are compiled for, as nvcc -gencode takes it")

function(kvloom_cuda target)
  target_include_directories(${target} SYSTEM PUBLIC "$<BUILD_INTERFACE:${KVLOOM_CUDA_INCLUDE}>")
  target_link_libraries(${target} PRIVATE ${CMAKE_DL_LIBS})
  set(codes "")
  foreach(code IN LISTS KVLOOM_CUDA_CODE)
    list(APPEND codes -gencode "${code}")
  endforeach()
  set(to "${PROJECT_BINARY_DIR}/generated/cuda")
  file(MAKE_DIRECTORY "${to}")
  file(GLOB kernels CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/transport/cuda/*.cu")
  foreach(kernel IN LISTS kernels)
    cmake_path(GET kernel STEM stem)
    set(fatbin "${to}/${stem}.fatbin")
    add_custom_command(
      OUTPUT "${fatbin}"
      COMMAND "${CUDAToolkit_NVCC_EXECUTABLE}" -fatbin -std=c++20 -O3 -Werror all-warnings ${codes}
              -I "${PROJECT_BINARY_DIR}/include" -MD -MF "${fatbin}.d" -o "${fatbin}" "${kernel}"
      DEPENDS "${kernel}" DEPFILE "${fatbin}.d"
      COMMENT "nvcc ${stem}.cu" VERBATIM)
    # A name in .rodata at the fat binary's bytes. A .cc of assembler, so that no second language has to be enabled.
    file(CONFIGURE OUTPUT "${to}/${stem}_fatbin.cc" @ONLY CONTENT [[
__asm__(
    ".pushsection .rodata\n"
    ".balign 64\n"
    ".globl kvloom_@stem@_fatbin\n"
    ".type kvloom_@stem@_fatbin, %object\n"
    "kvloom_@stem@_fatbin:\n"
    ".incbin \"@fatbin@\"\n"
    ".size kvloom_@stem@_fatbin, . - kvloom_@stem@_fatbin\n"
    ".popsection\n");
]])
    set_source_files_properties("${to}/${stem}_fatbin.cc" PROPERTIES OBJECT_DEPENDS "${fatbin}" SKIP_UNITY_BUILD_INCLUSION ON)
    target_sources(${target} PRIVATE "${to}/${stem}_fatbin.cc" "${fatbin}")
  endforeach()
endfunction()
