# cmake --install: headers, the library, find_package(kvloom), the command line and its shell completion.
include(CMakePackageConfigHelpers)
set(config_dir "${CMAKE_INSTALL_LIBDIR}/cmake/kvloom")

install(TARGETS kvloom EXPORT kvloomTargets ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}")
install(DIRECTORY "${PROJECT_SOURCE_DIR}/src/" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/kvloom"
        FILES_MATCHING PATTERN "*.h" PATTERN "tools" EXCLUDE PATTERN "flat_root.h" EXCLUDE)
install(EXPORT kvloomTargets NAMESPACE kvloom:: DESTINATION "${config_dir}")
configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/kvloomConfig.cmake.in" "${PROJECT_BINARY_DIR}/kvloomConfig.cmake"
                              INSTALL_DESTINATION "${config_dir}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/kvloomConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/kvloomConfig.cmake" "${PROJECT_BINARY_DIR}/kvloomConfigVersion.cmake"
        DESTINATION "${config_dir}")

if(TARGET kvloom_cli)
  install(TARGETS kvloom_cli RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}")
endif()

# The scripts come out of the command line that was built, so they know its options.
function(kvloom_completion shell file)
  install(CODE "
    set(file \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_DATADIR}/${file}\")
    get_filename_component(folder \"\${file}\" DIRECTORY)
    file(MAKE_DIRECTORY \"\${folder}\")
    execute_process(COMMAND \"$<TARGET_FILE:kvloom_cli>\" completion ${shell} OUTPUT_FILE \"\${file}\" COMMAND_ERROR_IS_FATAL ANY)
    message(STATUS \"Installing: \${file}\")")
endfunction()
if(TARGET kvloom_cli)
  kvloom_completion(bash bash-completion/completions/kvloom)
  kvloom_completion(zsh zsh/site-functions/_kvloom)
  kvloom_completion(fish fish/vendor_completions.d/kvloom.fish)
endif()
