// What a user's program looks like: it sees installed headers and find_package(kvloom), nothing of the source tree.
#include <iostream>

#include "kvloom/base/error.h"

namespace {

kvloom::Expected<int> positive(int n) {
  if (n <= 0) return kvloom::fail(kvloom::Code::invalid_argument, "n={} is not positive", n);
  return n;
}

}  // namespace

int main() {
  const auto bad = positive(-3);
  if (positive(3) != 3 || bad) return 1;
  std::cout << kvloom::to_string(bad.error()) << "\n";
  return 0;
}
