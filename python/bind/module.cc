// module.cc: the extension kvloom._kvloom.  Stage: python.  What a user imports is kvloom (python/kvloom/__init__.py).
#include "python/bind/bind.h"

NB_MODULE(_kvloom, m) {
  using namespace kvloom::python;
  nb::set_leak_warnings(false);  // what a program leaves to daemon threads and cycles when it ends is its business
  m.doc() = "The C++ library of kvloom; import kvloom instead.";
  m.attr("version") = KVLOOM_VERSION;
  bind_base(m);
  bind_geometry(m);
  bind_plan(m);
  bind_bind(m);
  bind_landing(m);
  bind_transport(m);
  bind_session_values(m);
  bind_session(m);
  bind_tools(m);
}
