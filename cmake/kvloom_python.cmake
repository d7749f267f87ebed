# The extension kvloom._kvloom: included only with -DKVLOOM_PYTHON=ON, which pyproject.toml says; `pip install .` is the way to build it.
# One module of python/bind/*.cc over the libraries of C++ and the command line, which `python -m kvloom` calls; and its type stub.
# Python 3.12 and newer: the limited API, one module for all of them (nanobind asks for that version); older ones: a module each.
if(NOT KVLOOM_BUILD_TOOLS)
  message(FATAL_ERROR "KVLOOM_PYTHON wants KVLOOM_BUILD_TOOLS: python -m kvloom is the command line")
endif()
set(sabi "")
if(SKBUILD_SABI_COMPONENT)
  set(sabi ${SKBUILD_SABI_COMPONENT})
endif()
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module ${sabi})
find_package(nanobind CONFIG REQUIRED)

# main() of the command line, to be called. A library of its own: the definition must not reach the executable.
add_library(kvloom_python_main OBJECT "${PROJECT_SOURCE_DIR}/src/tools/main.cc")
kvloom_own(kvloom_python_main)
set_target_properties(kvloom_python_main PROPERTIES POSITION_INDEPENDENT_CODE ON)
target_compile_definitions(kvloom_python_main PRIVATE main=kvloom_main KVLOOM_VERSION="${PROJECT_VERSION}")
target_compile_options(kvloom_python_main PRIVATE -Wno-missing-declarations)
target_link_libraries(kvloom_python_main PRIVATE kvloom_tools)

file(GLOB bindings CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/python/bind/*.cc")
if(KVLOOM_CUDA)
  list(FILTER bindings EXCLUDE REGEX "/cuda_none\\.cc$")
else()
  list(FILTER bindings EXCLUDE REGEX "/cuda\\.cc$")
endif()
nanobind_add_module(_kvloom STABLE_ABI NB_STATIC NB_SUPPRESS_WARNINGS NOMINSIZE ${bindings} $<TARGET_OBJECTS:kvloom_python_main>)
kvloom_own(_kvloom)
target_include_directories(_kvloom PRIVATE "${PROJECT_SOURCE_DIR}")  # "python/bind/<file>.h"
target_compile_definitions(_kvloom PRIVATE KVLOOM_VERSION="${PROJECT_VERSION}")
target_link_libraries(_kvloom PRIVATE kvloom_tools kvloom::kvloom)
target_link_options(_kvloom PRIVATE -Wl,--exclude-libs,ALL)  # of our archives too only what Python looks for is seen from outside

# The package in the build folder, for the stub and for trying it without an installation.
set(package "${PROJECT_BINARY_DIR}/python/kvloom")
file(MAKE_DIRECTORY "${package}")
set_target_properties(_kvloom PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${package}")
file(GLOB python_files CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/python/kvloom/*.py" "${PROJECT_SOURCE_DIR}/python/kvloom/py.typed")
foreach(file IN LISTS python_files)
  cmake_path(GET file FILENAME name)
  file(CREATE_LINK "${file}" "${package}/${name}" SYMBOLIC)
endforeach()
nanobind_add_stub(kvloom_stub MODULE kvloom._kvloom OUTPUT "${package}/_kvloom.pyi" PYTHON_PATH "${PROJECT_BINARY_DIR}/python"
                  DEPENDS _kvloom ${python_files})

install(TARGETS _kvloom LIBRARY DESTINATION kvloom COMPONENT python)
install(FILES "${package}/_kvloom.pyi" DESTINATION kvloom COMPONENT python)
