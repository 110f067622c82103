// Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
// A POSIX shared-memory segment of the CPU engine: private to the user, mapped by all ranks, its name removed as soon
// as all have mapped it, so that a killed run leaves nothing behind.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace mscclpp_dispatcher {

class SharedSegment {
public:
  // Makes a new segment of mode 0600, its memory reserved (a full /dev/shm is an error here, not a later crash).
  // Throws std::system_error.
  static std::unique_ptr<SharedSegment> create(const std::string& name, size_t bytes);
  // Maps a peer's segment; refuses one of another user or size. Throws std::system_error or std::invalid_argument.
  static std::unique_ptr<SharedSegment> open(const std::string& name, size_t bytes);
  ~SharedSegment();
  SharedSegment(const SharedSegment&) = delete;
  SharedSegment& operator=(const SharedSegment&) = delete;

  uint8_t* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  // Removes the name; mappings stay. A missing name is no error.
  static void unlink(const std::string& name) noexcept;

private:
  SharedSegment(int file, const std::string& name, size_t bytes);

  uint8_t* data_;
  size_t bytes_;
};

} // namespace mscclpp_dispatcher
