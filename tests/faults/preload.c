/* LD_PRELOAD library: the N-th write, fsync, rename or opening for writing below a folder fails in a chosen way.
 *
 * FAULT_STATE names a file of one `struct state`, mapped by every process of a test, so that calls are counted over all of them and the
 * test can aim at the next call without starting a process anew.  What glibc calls inside itself (fopen's own open) is not seen; Python,
 * pyarrow and Rust go through the symbols below, and tests assert that `count` rose.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { NONE, REFUSE, SHORT };
enum op { OP_OPEN = 1, OP_WRITE = 2, OP_FSYNC = 4, OP_RENAME = 8, OP_TRUNCATE = 16, OP_MKDIR = 32 };

struct state {
    uint64_t count;    /* matching calls so far */
    uint64_t target;   /* the call that fails, 1-based */
    uint64_t fired;    /* calls that were made to fail */
    uint32_t kind;     /* enum kind; SHORT writes half, then refuses the rest */
    uint32_t error;    /* errno */
    uint32_t sticky;   /* every call from the target on fails */
    uint32_t ops;      /* mask of enum op */
    char folder[4096]; /* absolute, no trailing slash */
};

static struct state *shared;

__attribute__((constructor)) static void map_state(void) {
    const char *path = getenv("FAULT_STATE");
    int (*real_open)(const char *, int, ...) = dlsym(RTLD_NEXT, "open");
    int fd = path ? real_open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    void *at = mmap(NULL, sizeof(struct state), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (at != MAP_FAILED)
        shared = at;
}

static int below(const char *path) {
    size_t n = strlen(shared->folder);
    return n && strncmp(path, shared->folder, n) == 0 && (path[n] == '/' || path[n] == 0);
}

/* Whether this call is to fail. */
static int fires(enum op op, const char *path) {
    if (!shared || shared->kind == NONE || !path || !(shared->ops & op) || !below(path))
        return 0;
    uint64_t now = __atomic_add_fetch(&shared->count, 1, __ATOMIC_SEQ_CST);
    if (now != shared->target && !(shared->sticky && now > shared->target && shared->target))
        return 0;
    __atomic_add_fetch(&shared->fired, 1, __ATOMIC_SEQ_CST);
    return 1;
}

static const char *path_of(int fd, char *buffer) {
    char link[64];
    struct stat st;
    if (!shared || shared->kind == NONE || fstat(fd, &st) != 0 || !(S_ISREG(st.st_mode) || S_ISDIR(st.st_mode)))
        return NULL;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, buffer, PATH_MAX - 1);
    if (n <= 0)
        return NULL;
    buffer[n] = 0;
    return buffer;
}

static const char *absolute(const char *path, char *buffer) {
    if (path[0] == '/')
        return path;
    if (!getcwd(buffer, PATH_MAX) || strlen(buffer) + strlen(path) + 2 > PATH_MAX)
        return path;
    strcat(strcat(buffer, "/"), path);
    return buffer;
}

static int refuse(void) {
    errno = (int)shared->error;
    return -1;
}

#define REAL(name) __typeof__(name) *real = dlsym(RTLD_NEXT, #name)

#define OPEN_BODY(name, call)                                                                                                        \
    REAL(name);                                                                                                                      \
    mode_t mode = 0;                                                                                                                 \
    if (flags & (O_CREAT | O_TMPFILE)) {                                                                                             \
        va_list arguments;                                                                                                           \
        va_start(arguments, flags);                                                                                                  \
        mode = va_arg(arguments, mode_t);                                                                                            \
        va_end(arguments);                                                                                                           \
    }                                                                                                                                \
    char buffer[PATH_MAX];                                                                                                           \
    if ((flags & O_ACCMODE) != O_RDONLY && fires(OP_OPEN, absolute(path, buffer)))                                                   \
        return refuse();                                                                                                             \
    return call;

int open(const char *path, int flags, ...) { OPEN_BODY(open, real(path, flags, mode)) }
int open64(const char *path, int flags, ...) { OPEN_BODY(open64, real(path, flags, mode)) }
int openat(int at, const char *path, int flags, ...) { OPEN_BODY(openat, real(at, path, flags, mode)) }
int openat64(int at, const char *path, int flags, ...) { OPEN_BODY(openat64, real(at, path, flags, mode)) }

/* Half of a write that is to be short goes through; the call after it, for the rest, is refused when faults stick. */
static size_t part(size_t count) { return shared->kind == SHORT && count > 1 ? count / 2 : 0; }

#define WRITE_BODY(name, ...)                                                                                                        \
    REAL(name);                                                                                                                      \
    char buffer[PATH_MAX];                                                                                                           \
    if (fires(OP_WRITE, path_of(fd, buffer))) {                                                                                      \
        if (!part(count) || shared->fired > 1)                                                                                       \
            return refuse();                                                                                                         \
        count = part(count);                                                                                                         \
    }                                                                                                                                \
    return real(__VA_ARGS__);

ssize_t write(int fd, const void *data, size_t count) { WRITE_BODY(write, fd, data, count) }
ssize_t pwrite(int fd, const void *data, size_t count, off_t at) { WRITE_BODY(pwrite, fd, data, count, at) }
ssize_t pwrite64(int fd, const void *data, size_t count, off64_t at) { WRITE_BODY(pwrite64, fd, data, count, at) }

/* How shutil copies. */
#define SEND_BODY(name, ...)                                                                                                         \
    REAL(name);                                                                                                                      \
    char buffer[PATH_MAX];                                                                                                           \
    if (fires(OP_WRITE, path_of(out, buffer))) {                                                                                     \
        if (!part(count) || shared->fired > 1)                                                                                       \
            return refuse();                                                                                                         \
        struct stat st; /* the caller asks for more than there is */                                                                 \
        count = fstat(in, &st) == 0 && part((size_t)st.st_size) ? part((size_t)st.st_size) : 1;                                      \
    }                                                                                                                                \
    return real(__VA_ARGS__);

ssize_t sendfile(int out, int in, off_t *at, size_t count) { SEND_BODY(sendfile, out, in, at, count) }
ssize_t sendfile64(int out, int in, off64_t *at, size_t count) { SEND_BODY(sendfile64, out, in, at, count) }

ssize_t writev(int fd, const struct iovec *parts, int count) {
    REAL(writev);
    char buffer[PATH_MAX];
    return fires(OP_WRITE, path_of(fd, buffer)) ? refuse() : real(fd, parts, count);
}

#define FD_BODY(name, op, ...)                                                                                                       \
    REAL(name);                                                                                                                      \
    char buffer[PATH_MAX];                                                                                                           \
    return fires(op, path_of(fd, buffer)) ? refuse() : real(__VA_ARGS__);

int fsync(int fd) { FD_BODY(fsync, OP_FSYNC, fd) }
int fdatasync(int fd) { FD_BODY(fdatasync, OP_FSYNC, fd) }
int ftruncate(int fd, off_t size) { FD_BODY(ftruncate, OP_TRUNCATE, fd, size) }
int ftruncate64(int fd, off64_t size) { FD_BODY(ftruncate64, OP_TRUNCATE, fd, size) }

#define RENAME_BODY(name, ...)                                                                                                       \
    REAL(name);                                                                                                                      \
    char buffer[PATH_MAX];                                                                                                           \
    return fires(OP_RENAME, absolute(to, buffer)) ? refuse() : real(__VA_ARGS__);

int rename(const char *from, const char *to) { RENAME_BODY(rename, from, to) }
int renameat(int a, const char *from, int b, const char *to) { RENAME_BODY(renameat, a, from, b, to) }
int renameat2(int a, const char *from, int b, const char *to, unsigned flags) { RENAME_BODY(renameat2, a, from, b, to, flags) }

int mkdir(const char *path, mode_t mode) {
    REAL(mkdir);
    char buffer[PATH_MAX];
    return fires(OP_MKDIR, absolute(path, buffer)) ? refuse() : real(path, mode);
}
