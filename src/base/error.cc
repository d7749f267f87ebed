#include "kvloom/base/error.h"

namespace kvloom {

const char* to_string(Code code) {
  switch (code) {
    case Code::invalid_argument: return "invalid argument";
    case Code::parse: return "parse";
    case Code::unsupported: return "unsupported";
    case Code::out_of_range: return "out of range";
    case Code::overflow: return "overflow";
    case Code::exhausted: return "exhausted";
    case Code::unavailable: return "unavailable";
    case Code::deadline: return "deadline";
    case Code::cancelled: return "cancelled";
    case Code::io: return "io";
  }
  return "unknown";
}

const char* to_string(Scope scope) {
  switch (scope) {
    case Scope::operation: return "operation";
    case Scope::transfer: return "transfer";
    case Scope::peer: return "peer";
    case Scope::process: return "process";
  }
  return "unknown";
}

std::string to_string(const Error& error) {
  return fmt::format("{} ({}): {}", to_string(error.code), to_string(error.scope), error.message);
}

}  // namespace kvloom
