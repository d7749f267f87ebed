// Any bytes as what a peer may say: a message about a transfer or a connection, a progress notice. Nothing throws, overflows, reads outside of them or
// hangs; what decodes is encoded to bytes that decode to itself.
// Seeds: corpus/session_wire_fuzz.  session_wire_fuzz -max_len=4096 -timeout=10 tests/fuzz/corpus/session_wire_fuzz
#include <cstdint>
#include <cstdlib>
#include <span>

#include "kvloom/plan/wire.h"
#include "kvloom/session/connection.h"
#include "kvloom/session/progress.h"
#include "kvloom/session/wire.h"

namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

template <class T, class Encode, class Decode>
void check(const kvloom::Expected<T>& read, Encode encode, Decode decode) {
  if (!read) return require(!read.error().message.empty());
  const auto again = decode(encode(*read));
  require(again && *again == *read);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::span bytes(data, size);
  const auto message = kvloom::decode_message(bytes);
  check(message, kvloom::encode_message, kvloom::decode_message);
  if (message) require(!to_string(*message).empty());
  check(kvloom::decode_told(bytes), kvloom::encode_told, kvloom::decode_told);
  check(kvloom::decode_side(bytes), kvloom::encode_side, kvloom::decode_side);
  check(kvloom::decode_progress(std::as_bytes(bytes)), kvloom::encode_progress, kvloom::decode_progress);
  return 0;
}
