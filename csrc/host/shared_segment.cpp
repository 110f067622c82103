// Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
#include "host/shared_segment.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "common/check.hpp"

namespace mscclpp_dispatcher {
namespace {

class FileDescriptor {
public:
  explicit FileDescriptor(int file) : file_(file) {}
  ~FileDescriptor() { ::close(file_); }
  int get() const { return file_; }

private:
  int file_;
};

int open_or_throw(const std::string& name, int flags) {
  const int file = ::shm_open(name.c_str(), flags | O_CLOEXEC, 0600);
  if (file < 0) {
    throw std::system_error(errno, std::generic_category(), "shared-memory segment " + name);
  }
  return file;
}

} // namespace

SharedSegment::SharedSegment(int file, const std::string& name, size_t bytes) : bytes_(bytes) {
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (data == MAP_FAILED) {
    throw std::system_error(errno, std::generic_category(),
                            concat("mapping ", bytes, " bytes of shared-memory segment ", name));
  }
  data_ = static_cast<uint8_t*>(data);
}

SharedSegment::~SharedSegment() { ::munmap(data_, bytes_); }

std::unique_ptr<SharedSegment> SharedSegment::create(const std::string& name, size_t bytes) {
  const FileDescriptor file(open_or_throw(name, O_RDWR | O_CREAT | O_EXCL));
  if (const int error = ::posix_fallocate(file.get(), 0, static_cast<off_t>(bytes))) {
    unlink(name);
    throw std::system_error(
        error, std::generic_category(),
        concat("reserving ", bytes, " bytes of shared memory for ", name,
               " (enlarge /dev/shm, or lower max_tokens_per_rank, num_slots or num_ranks on this machine)"));
  }
  try {
    return std::unique_ptr<SharedSegment>(new SharedSegment(file.get(), name, bytes));
  } catch (const std::system_error&) {
    unlink(name);
    throw;
  }
}

std::unique_ptr<SharedSegment> SharedSegment::open(const std::string& name, size_t bytes) {
  const FileDescriptor file(open_or_throw(name, O_RDWR));
  struct stat status{};
  if (::fstat(file.get(), &status) != 0) {
    throw std::system_error(errno, std::generic_category(), "reading the status of shared-memory segment " + name);
  }
  check_argument(status.st_uid == ::geteuid(), "shared-memory segment ", name, " belongs to user ", status.st_uid,
                 ", this process to user ", ::geteuid(), "; run all ranks as one user");
  check_argument(static_cast<size_t>(status.st_size) == bytes, "shared-memory segment ", name, " has ", status.st_size,
                 " bytes; expected ", bytes);
  return std::unique_ptr<SharedSegment>(new SharedSegment(file.get(), name, bytes));
}

void SharedSegment::unlink(const std::string& name) noexcept { ::shm_unlink(name.c_str()); }

} // namespace mscclpp_dispatcher
