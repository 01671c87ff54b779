//! MPI's functions with their codes checked.

use crate::error::Failure;
use candle_core::DType;
use mpi::ffi;
use std::ffi::{c_char, c_int, c_void};
use std::marker::PhantomData;
use std::ptr::null_mut;

/// What an error of a function is called.
fn checked(call: &'static str, code: c_int) -> Result<(), Failure> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let text = text(ffi::MPI_MAX_ERROR_STRING as usize, |text, len| {
        // SAFETY: `text` has room for the longest message, and both pointers are valid for writes.
        unsafe { ffi::MPI_Error_string(code, text, len) }
    });
    Err(Failure::Library {
        call,
        code,
        message: text,
    })
}

/// What a function writes that gives a text and its length.
fn text(room: usize, write: impl FnOnce(*mut c_char, *mut c_int) -> c_int) -> String {
    let mut bytes = vec![0u8; room + 1];
    let mut len = 0;
    let code = write(bytes.as_mut_ptr().cast(), &mut len);
    if code != ffi::MPI_SUCCESS as c_int {
        return "no text".to_owned();
    }
    bytes.truncate(usize::try_from(len).unwrap_or(0));
    String::from_utf8_lossy(&bytes).trim().to_owned()
}

/// MPI, started by this thread. Neither this nor what comes of it leaves the thread.
#[derive(Debug)]
pub(super) struct Library {
    _of_this_thread: PhantomData<*const ()>,
}

impl Library {
    /// Starts MPI. Once in a process.
    pub(super) fn start() -> Result<Self, Failure> {
        let mut started = 0;
        // SAFETY: allowed before MPI is started; the pointer is valid for writes.
        checked("MPI_Initialized", unsafe {
            ffi::MPI_Initialized(&mut started)
        })?;
        if started != 0 {
            return Err(Failure::Unsupported {
                engine: "MPI",
                problem: "MPI was started before in this process; join the world once".to_owned(),
            });
        }
        let mut level = 0;
        // SAFETY: MPI was not started before; null stands for no arguments; reading a constant of the library.
        let code = unsafe {
            let funneled = ffi::RSMPI_THREAD_FUNNELED;
            ffi::MPI_Init_thread(null_mut(), null_mut(), funneled, &mut level)
        };
        checked("MPI_Init_thread", code)?;
        // SAFETY: reading a constant of the library.
        if level < unsafe { ffi::RSMPI_THREAD_FUNNELED } {
            return Err(Failure::Unsupported {
                engine: "MPI",
                problem: "this MPI library was built without threads".to_owned(),
            });
        }
        Ok(Self {
            _of_this_thread: PhantomData,
        })
    }

    /// The group of all processes.
    pub(super) fn world(&self) -> Result<Communicator, Failure> {
        // SAFETY: reading a constant of the library.
        Communicator::new(unsafe { ffi::RSMPI_COMM_WORLD })
    }

    /// Name and version of the library.
    pub(super) fn version(&self) -> String {
        // SAFETY: reading a constant of the library.
        let room = unsafe { ffi::RSMPI_MAX_LIBRARY_VERSION_STRING };
        let text = text(usize::try_from(room).unwrap_or(8192), |text, len| {
            // SAFETY: `text` has room for the longest version, and both pointers are valid for writes.
            unsafe { ffi::MPI_Get_library_version(text, len) }
        });
        let end = text.find([',', '\n', '\0']).unwrap_or(text.len());
        text[..end].trim().to_owned()
    }

    /// Ends MPI. Waits for the other processes.
    pub(super) fn finish(self) -> Result<(), Failure> {
        // SAFETY: MPI is started, this is its thread, and `self` is gone after it.
        checked("MPI_Finalize", unsafe { ffi::MPI_Finalize() })
    }
}

/// A group of processes. It lives until MPI ends: freeing it would be a collective of its own.
#[derive(Debug)]
pub(super) struct Communicator {
    raw: ffi::MPI_Comm,
    pub(super) rank: usize,
    pub(super) size: usize,
    _of_this_thread: PhantomData<*const ()>,
}

impl Communicator {
    fn new(raw: ffi::MPI_Comm) -> Result<Self, Failure> {
        let (mut rank, mut size) = (0, 0);
        // SAFETY: `raw` is a communicator; an error is a code from here on and does not end the process.
        checked("MPI_Comm_set_errhandler", unsafe {
            ffi::MPI_Comm_set_errhandler(raw, ffi::RSMPI_ERRORS_RETURN)
        })?;
        // SAFETY: `raw` is a communicator, and the pointer is valid for writes.
        checked("MPI_Comm_rank", unsafe {
            ffi::MPI_Comm_rank(raw, &mut rank)
        })?;
        // SAFETY: `raw` is a communicator, and the pointer is valid for writes.
        checked("MPI_Comm_size", unsafe {
            ffi::MPI_Comm_size(raw, &mut size)
        })?;
        Ok(Self {
            raw,
            rank: rank as usize,
            size: size as usize,
            _of_this_thread: PhantomData,
        })
    }

    /// Groups of the processes with the same color. It blocks until all have called it.
    pub(super) fn split(&self, color: Option<usize>, key: usize) -> Result<Option<Self>, Failure> {
        let number = |value: usize| {
            c_int::try_from(value).map_err(|_| Failure::Unsupported {
                engine: "MPI",
                problem: format!("color or key {value}: at most {}", c_int::MAX),
            })
        };
        let color_of_mpi = match color {
            Some(color) => number(color)?,
            // SAFETY: reading a constant of the library.
            None => unsafe { ffi::RSMPI_UNDEFINED },
        };
        let key = number(key)?;
        // SAFETY: `self.raw` is a communicator, and the pointer is valid for writes.
        let (code, raw) = unsafe {
            let mut raw = ffi::RSMPI_COMM_NULL;
            let code = ffi::MPI_Comm_split(self.raw, color_of_mpi, key, &mut raw);
            (code, raw)
        };
        checked("MPI_Comm_split", code)?;
        color.map(|_| Self::new(raw)).transpose()
    }

    /// `MPI_Ibarrier`.
    pub(super) fn barrier(&self) -> Result<Request, Failure> {
        // SAFETY: `self.raw` is a communicator.
        Request::started("MPI_Ibarrier", |request| unsafe {
            ffi::MPI_Ibarrier(self.raw, request)
        })
    }

    /// `MPI_Ibcast` of `count` elements at `data`.
    ///
    /// # Safety
    /// Until the request is done, `data` is valid for reads and writes of so many elements, and nothing else uses them.
    pub(super) unsafe fn broadcast(
        &self,
        data: *mut c_void,
        count: c_int,
        of: DType,
        root: usize,
    ) -> Result<Request, Failure> {
        let root = root as c_int;
        // SAFETY: the caller's promise, and `self.raw` is a communicator.
        Request::started("MPI_Ibcast", |request| unsafe {
            ffi::MPI_Ibcast(data, count, moved(of), root, self.raw, request)
        })
    }

    /// `MPI_Iallreduce` of `count` elements: the maximum of the bits of U32 as signed integers, the sum of F32 and F64.
    ///
    /// # Safety
    /// Until the request is done, `send` is valid for reads and `receive` for writes of so many elements, nothing else writes to
    /// `send`, and nothing else uses `receive`.
    pub(super) unsafe fn reduce(
        &self,
        send: *const c_void,
        receive: *mut c_void,
        count: c_int,
        of: DType,
    ) -> Result<Request, Failure> {
        // SAFETY: reading constants of the library.
        let (datatype, op) = unsafe {
            match of {
                DType::F32 => (ffi::RSMPI_FLOAT, ffi::RSMPI_SUM),
                DType::F64 => (ffi::RSMPI_DOUBLE, ffi::RSMPI_SUM),
                _ => (ffi::RSMPI_INT32_T, ffi::RSMPI_MAX),
            }
        };
        // SAFETY: the caller's promise, and `self.raw` is a communicator.
        Request::started("MPI_Iallreduce", |request| unsafe {
            ffi::MPI_Iallreduce(send, receive, count, datatype, op, self.raw, request)
        })
    }

    /// `MPI_Iallgatherv`.
    ///
    /// # Safety
    /// As [`Communicator::reduce`], for `count` elements of `send` and all elements of `receive` that `parts` names; `parts`
    /// has a part for each rank, and stays where it is.
    pub(super) unsafe fn all_gather(
        &self,
        send: *const c_void,
        count: c_int,
        receive: *mut c_void,
        parts: &Parts,
        of: DType,
    ) -> Result<Request, Failure> {
        let (counts, begins) = (parts.counts.as_ptr(), parts.begins.as_ptr());
        // SAFETY: the caller's promise, and `self.raw` is a communicator.
        Request::started("MPI_Iallgatherv", |request| unsafe {
            let of = moved(of);
            ffi::MPI_Iallgatherv(
                send, count, of, receive, counts, begins, of, self.raw, request,
            )
        })
    }

    /// `MPI_Ialltoallv`.
    ///
    /// # Safety
    /// As [`Communicator::reduce`], for all elements that `sent` and `received` name; both have a part for each rank, and stay
    /// where they are.
    pub(super) unsafe fn all_to_all(
        &self,
        send: *const c_void,
        sent: &Parts,
        receive: *mut c_void,
        received: &Parts,
        of: DType,
    ) -> Result<Request, Failure> {
        let (counts, begins) = (sent.counts.as_ptr(), sent.begins.as_ptr());
        let (receive_counts, receive_begins) = (received.counts.as_ptr(), received.begins.as_ptr());
        // SAFETY: the caller's promise, and `self.raw` is a communicator.
        Request::started("MPI_Ialltoallv", |request| unsafe {
            let of = moved(of);
            ffi::MPI_Ialltoallv(
                send,
                counts,
                begins,
                of,
                receive,
                receive_counts,
                receive_begins,
                of,
                self.raw,
                request,
            )
        })
    }
}

/// Counts and begins of parts that lie one after the other, one for each rank. They do not move with their owner.
#[derive(Debug)]
pub(super) struct Parts {
    counts: Box<[c_int]>,
    begins: Box<[c_int]>,
}

impl Parts {
    /// # Errors
    /// Together they have more elements than MPI counts.
    pub(super) fn new(counts: impl IntoIterator<Item = usize>) -> Result<Self, Failure> {
        let mut begin = 0;
        let (mut all, mut begins) = (vec![], vec![]);
        for count in counts {
            begins.push(int(begin)?);
            all.push(int(count)?);
            begin += count;
        }
        int(begin)?;
        Ok(Self {
            counts: all.into(),
            begins: begins.into(),
        })
    }
}

/// A number of elements for MPI.
pub(super) fn int(count: usize) -> Result<c_int, Failure> {
    c_int::try_from(count).map_err(|_| Failure::Unsupported {
        engine: "MPI",
        problem: format!("{count} elements in one call: cut them into several"),
    })
}

/// The datatype under which elements of this size travel: MPI has no 16-bit and 8-bit floats, and moving needs none.
fn moved(dtype: DType) -> ffi::MPI_Datatype {
    // SAFETY: reading constants of the library.
    unsafe {
        match dtype.size_in_bytes() {
            1 => ffi::RSMPI_UINT8_T,
            2 => ffi::RSMPI_UINT16_T,
            4 => ffi::RSMPI_UINT32_T,
            _ => ffi::RSMPI_UINT64_T,
        }
    }
}

/// A collective under way.
#[derive(Debug)]
pub(super) struct Request {
    raw: ffi::MPI_Request,
    _of_this_thread: PhantomData<*const ()>,
}

impl Request {
    fn started(
        call: &'static str,
        start: impl FnOnce(*mut ffi::MPI_Request) -> c_int,
    ) -> Result<Self, Failure> {
        // SAFETY: reading a constant of the library.
        let mut raw = unsafe { ffi::RSMPI_REQUEST_NULL };
        checked(call, start(&mut raw))?;
        Ok(Self {
            raw,
            _of_this_thread: PhantomData,
        })
    }

    /// Whether it is done. Lets MPI make progress.
    pub(super) fn test(&mut self) -> Result<bool, Failure> {
        let mut done = 0;
        // SAFETY: `self.raw` is a request or, after it was done, the null request; the pointers are valid for writes.
        checked("MPI_Test", unsafe {
            ffi::MPI_Test(&mut self.raw, &mut done, ffi::RSMPI_STATUS_IGNORE)
        })?;
        Ok(done != 0)
    }
}
