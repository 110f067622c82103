// Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
// Host checks whose messages carry the values. Python validates first; these guard the C++ boundary itself.
#pragma once

#include <sstream>
#include <stdexcept>

namespace mscclpp_dispatcher {

template <typename... Parts> std::string concat(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

// Throws std::invalid_argument with the parts joined when the condition is false.
template <typename... Parts> void check_argument(bool condition, const Parts&... parts) {
  if (!condition) {
    throw std::invalid_argument(concat(parts...));
  }
}

} // namespace mscclpp_dispatcher
