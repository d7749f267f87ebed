# How our own code is compiled. Nothing here reaches a project that uses kvloom.
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

find_program(KVLOOM_CCACHE ccache)
if(KVLOOM_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER "${KVLOOM_CCACHE}")
endif()

# Warnings are errors with the compilers that we test with; a newer compiler's new warning must not stop a user's build.
set(werror OFF)
if((CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
   OR (CMAKE_CXX_COMPILER_ID STREQUAL "Clang" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 15))
  set(werror ON)
endif()
option(KVLOOM_WERROR "Treat warnings in our code as errors" ${werror})

# Everywhere, in the tree and installed, a header is included as "kvloom/<folder>/<file>.h".
file(MAKE_DIRECTORY "${PROJECT_BINARY_DIR}/include")
file(CREATE_LINK "${PROJECT_SOURCE_DIR}/src" "${PROJECT_BINARY_DIR}/include/kvloom" SYMBOLIC)

function(kvloom_own target)
  set_target_properties(${target} PROPERTIES CXX_STANDARD 20 CXX_STANDARD_REQUIRED ON CXX_EXTENSIONS OFF UNITY_BUILD ${KVLOOM_UNITY})
  # Some files have names of their own that others have too: twins (sender and receiver), and each transport's inner words.
  get_target_property(alone ${target} SOURCES)
  list(FILTER alone INCLUDE REGEX "/(sender|receiver|metrics|wire|cases|conformance|loopback|sharding|session/trace|shm/shm|shm/hostile|sim/world|(plan|tools)/(plan|text|tables|verb))(_test)?\\.cc$")
  set_source_files_properties(${alone} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  target_compile_options(${target} PRIVATE
    -Wall -Wextra $<$<CXX_COMPILER_ID:Clang>:-Wpedantic>  # GCC's forbids __int128, and can't be told not to
    -Wshadow -Wconversion -Wsign-conversion -Wnon-virtual-dtor -Woverloaded-virtual -Wcast-align
    -Wimplicit-fallthrough -Wno-missing-field-initializers)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    target_compile_options(${target} PRIVATE -Wno-restrict)  # GCC bug 105651: "text" + std::string warns at -O3
  endif()
  if(KVLOOM_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
  if(KVLOOM_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${KVLOOM_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
    target_compile_definitions(${target} PRIVATE _GLIBCXX_ASSERTIONS)
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")  # collects its garbage from 1 GB on: a sixth of the time of such a compilation
      target_compile_options(${target} PRIVATE --param=ggc-min-expand=1000 --param=ggc-min-heapsize=1000000)
    endif()
    string(REPLACE "fuzzer-no-link," "" link_sanitize "${KVLOOM_SANITIZE}")
    get_target_property(type ${target} TYPE)
    if(type STREQUAL "EXECUTABLE")
      target_link_options(${target} PRIVATE -fsanitize=${link_sanitize})
    endif()
  endif()
endfunction()

# For what is mostly other people's templates (JSON, CLI11, GoogleTest): without the two checks of UBSan that stand at every access and
# say least beside ASan, and with ASan's checks called rather than written out at every access (GCC; clang does so by itself where there are
# many). Half of such a file's compile time.
function(kvloom_sanitize_light target)
  if(KVLOOM_SANITIZE MATCHES "undefined")
    target_compile_options(${target} PRIVATE -fno-sanitize=null,alignment)
  endif()
  if(KVLOOM_SANITIZE MATCHES "address" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(${target} PRIVATE --param=asan-instrumentation-with-call-threshold=0)
  endif()
endfunction()

# out = the .cc files of these folders under src/ and of their subfolders, without tests. An empty folder gives none.
function(kvloom_sources out)
  set(all "")
  foreach(folder IN LISTS ARGN)
    file(GLOB_RECURSE found CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/${folder}/*.cc")
    list(APPEND all ${found})
  endforeach()
  list(FILTER all EXCLUDE REGEX "_test\\.cc$")
  # tools/cuda_x.cc stands beside cuda_x_none.cc, which says so where CUDA is not built.
  if(KVLOOM_CUDA)
    list(FILTER all EXCLUDE REGEX "/cuda_[^/]*_none\\.cc$")
  else()
    set(none "${all}")
    list(FILTER none INCLUDE REGEX "/cuda_[^/]*_none\\.cc$")
    list(FILTER all EXCLUDE REGEX "/src/transport/cuda/|/src/tools/cuda_[^/]*$")
    list(APPEND all ${none})
  endif()
  # x_x86.cc stands beside x_other.cc: the files of the processor that we build for.
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
    list(FILTER all EXCLUDE REGEX "_other\\.cc$")
  else()
    list(FILTER all EXCLUDE REGEX "_x86\\.cc$")
  endif()
  set(${out} "${all}" PARENT_SCOPE)
endfunction()

# src/<folder>/x.fbs becomes <build>/generated/kvloom/<folder>/x_generated.h, included as "kvloom/<folder>/x_generated.h".
function(kvloom_flatbuffers target)
  foreach(folder IN LISTS ARGN)
    file(GLOB_RECURSE schemas CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/${folder}/*.fbs")
    foreach(schema IN LISTS schemas)
      find_program(KVLOOM_FLATC flatc REQUIRED)
      cmake_path(GET schema STEM stem)
      cmake_path(GET schema PARENT_PATH from)
      cmake_path(RELATIVE_PATH from BASE_DIRECTORY "${PROJECT_SOURCE_DIR}/src" OUTPUT_VARIABLE place)
      set(to "${PROJECT_BINARY_DIR}/generated/kvloom/${place}")
      add_custom_command(
        OUTPUT "${to}/${stem}_generated.h"
        COMMAND "${KVLOOM_FLATC}" --cpp --cpp-std c++17 --scoped-enums --gen-mutable -o "${to}" "${schema}"
        DEPENDS "${schema}" VERBATIM)
      target_sources(${target} PRIVATE "${to}/${stem}_generated.h")
    endforeach()
  endforeach()
  target_include_directories(${target} SYSTEM PUBLIC $<BUILD_INTERFACE:${PROJECT_BINARY_DIR}/generated>)
endfunction()
