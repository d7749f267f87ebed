# One executable per folder of src/ and per folder of tests/; every case of it is a ctest entry, so ctest's count is the count of cases.
find_package(GTest REQUIRED)
find_package(rapidcheck REQUIRED)
include(GoogleTest)

set(sanitizer_environment "")
if(KVLOOM_SANITIZE MATCHES "thread")
  set(sanitizer_environment ENVIRONMENT_MODIFICATION "TSAN_OPTIONS=string_append::suppressions=${PROJECT_SOURCE_DIR}/tests/tsan.supp")
endif()

list(TRANSFORM KVLOOM_LIBRARY_FOLDERS APPEND _test OUTPUT_VARIABLE library_tests)
function(kvloom_test name)
  add_executable(${name} ${ARGN})
  kvloom_own(${name})
  kvloom_sanitize_light(${name})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    target_compile_options(${name} PRIVATE -Wno-maybe-uninitialized)  # at -O3 it takes strings inside of variants for such
  endif()
  target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}")  # "tests/<folder>/<file>.h"
  target_compile_definitions(${name} PRIVATE
    KVLOOM_SOURCE_DIR="${PROJECT_SOURCE_DIR}"
    KVLOOM_CLI="${PROJECT_BINARY_DIR}/kvloom")
  target_link_libraries(${name} PRIVATE kvloom::kvloom GTest::gtest GTest::gmock_main rapidcheck rapidcheck_gtest
                                        nlohmann_json::nlohmann_json)
  if(TARGET kvloom_cli AND NOT name IN_LIST library_tests)  # these may run the command line, or call what it is made of
    target_link_libraries(${name} PRIVATE $<TARGET_NAME_IF_EXISTS:kvloom_tools>)
    add_dependencies(${name} kvloom_cli)
  endif()
  gtest_discover_tests(${name} DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 120 WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}"
                       PROPERTIES TIMEOUT 300 LABELS ${name} ${sanitizer_environment})
endfunction()

foreach(folder IN LISTS KVLOOM_LIBRARY_FOLDERS ITEMS tools)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/${folder}/*_test.cc")
  if(folder STREQUAL "transport" AND KVLOOM_CUDA)
    file(GLOB cuda_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/cuda/*.cc")  # a driver of its own, for machines without a GPU
    list(APPEND sources ${cuda_sources})
  elseif(folder STREQUAL "tools" AND KVLOOM_CUDA)
    file(GLOB cuda_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/cuda/fake_*.cc")
    list(FILTER cuda_sources EXCLUDE REGEX "_test\\.cc$")
    list(APPEND sources ${cuda_sources})
  elseif(NOT KVLOOM_CUDA)
    list(FILTER sources EXCLUDE REGEX "/src/(transport/cuda/|tools/cuda_)")
  endif()
  if(sources)
    kvloom_test(${folder}_test ${sources})
  endif()
endforeach()

file(GLOB folders CONFIGURE_DEPENDS LIST_DIRECTORIES true "${PROJECT_SOURCE_DIR}/tests/*")
foreach(folder IN LISTS folders)
  cmake_path(GET folder FILENAME name)
  if(NOT IS_DIRECTORY "${folder}" OR name MATCHES "^(cuda|fuzz|install)$")
    continue()
  endif()
  file(GLOB sources CONFIGURE_DEPENDS "${folder}/*.cc")
  if(sources)
    kvloom_test(${name}_test ${sources})
  endif()
endforeach()

# tests/<folder>/*_test.py: checks without dependencies, one ctest entry each.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
function(kvloom_script_test name)
  add_test(NAME ${name} COMMAND Python3::Interpreter ${ARGN} WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}")
  string(REGEX REPLACE "\\..*" "" label "${name}")
  if(NOT TARGET ${label}_test)
    add_custom_target(${label}_test)  # so that every folder of tests can be asked for in the same way
    if(TARGET kvloom_cli)
      add_dependencies(${label}_test kvloom_cli)
    endif()
  endif()
  set_tests_properties(${name} PROPERTIES TIMEOUT 300 LABELS "${label}_test"
    ENVIRONMENT "KVLOOM_CLI=${PROJECT_BINARY_DIR}/kvloom;KVLOOM_SOURCE_DIR=${PROJECT_SOURCE_DIR};PYTHONDONTWRITEBYTECODE=1")
endfunction()
file(GLOB scripts CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/*/*_test.py")
foreach(script IN LISTS scripts)
  cmake_path(GET script STEM stem)
  cmake_path(GET script PARENT_PATH folder)
  cmake_path(GET folder FILENAME folder)
  kvloom_script_test(${folder}.${stem} "${script}")
endforeach()
# 10,000 schedules on both cores, most of a minute: not for the inner loop.
set_tests_properties(cli.simulate_test PROPERTIES LABELS "cli_test;slow" PROCESSORS 2)
kvloom_script_test(arrows.the_tree_follows_the_arrows "${PROJECT_SOURCE_DIR}/tests/arrows/arrows.py" "${PROJECT_SOURCE_DIR}/src")

# A project outside of the tree finds, builds and runs what we install.
set(flags "")
if(KVLOOM_SANITIZE)
  set(flags "-fsanitize=${KVLOOM_SANITIZE}")
endif()
add_test(NAME install.an_outside_project_builds_and_runs
  COMMAND "${CMAKE_COMMAND}" -D "BUILD=${PROJECT_BINARY_DIR}" -D "SOURCE=${PROJECT_SOURCE_DIR}/tests/install"
          -D "WORK=${PROJECT_BINARY_DIR}/install_test" -D "GENERATOR=${CMAKE_GENERATOR}" -D "COMPILER=${CMAKE_CXX_COMPILER}"
          -D "FLAGS=${flags}" -D "BUILD_TYPE=${CMAKE_BUILD_TYPE}" -P "${PROJECT_SOURCE_DIR}/tests/install/run.cmake")
set_tests_properties(install.an_outside_project_builds_and_runs PROPERTIES TIMEOUT 300 LABELS "install_test;slow")
