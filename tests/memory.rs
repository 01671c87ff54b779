//! Freed memory is kept: blocks that are allocated and freed repeatedly cost page faults only once. And huge pages are asked for. This is a
//! separate program and not a test on a thread, because only a process with a single thread can ask for it.

fn main() {
    let glibc = cfg!(all(target_os = "linux", target_env = "gnu"));
    assert_eq!(fp8::keep_freed_memory(), glibc);
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        huge_pages::are_asked_for();
        faults::stay_few();
        std::thread::spawn(faults::stay_few)
            .join()
            .expect("in a thread as in main");
    }
    let beside_another = std::thread::spawn(fp8::keep_freed_memory);
    assert_eq!(
        beside_another.join().ok(),
        Some(false),
        "changed beside a running thread"
    );
    println!("freed memory is kept: {glibc}");
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
mod huge_pages {
    use std::fs::read_to_string;

    /// Of the mapping that a new block lies in, as the system lists it.
    pub fn are_asked_for() {
        if read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").is_err() {
            println!("this system has no transparent huge pages");
            return;
        }
        if read_to_string("/proc/sys/vm/overcommit_memory").is_ok_and(|mode| mode.trim() == "2") {
            println!("this system reserves no addresses beyond its memory");
            return;
        }
        let block = vec![1u8; 32 << 20];
        let middle = block.as_ptr() as usize + block.len() / 2;
        let maps = read_to_string("/proc/self/smaps").expect("the mappings");
        let mut is_own = false;
        for line in maps.lines() {
            let range = line.split_whitespace().next().unwrap_or_default();
            let ends = range.split_once('-').map(|(from, to)| {
                [from, to].map(|end| usize::from_str_radix(end, 16).unwrap_or_default())
            });
            match ends {
                Some([from, to]) => is_own = (from..to).contains(&middle),
                None if is_own && line.starts_with("VmFlags:") => {
                    assert!(line.split_whitespace().any(|flag| flag == "hg"), "{line}");
                    return;
                }
                None => {}
            }
        }
        panic!("no mapping has the block");
    }
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
mod faults {
    use std::hint::black_box;

    /// Page faults of this thread so far.
    fn count() -> i64 {
        // SAFETY: zeros are a valid `rusage`, which `getrusage` overwrites.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: the pointer is that of a live `rusage`.
        let status = unsafe { libc::getrusage(libc::RUSAGE_THREAD, &mut usage) };
        assert_eq!(status, 0);
        usage.ru_minflt
    }

    /// Blocks of the sizes of small and large tensors, written in full.
    fn step() {
        let sizes = [1 << 16, 1 << 20, 5 << 20, 33 << 20, 100 << 20];
        let blocks: Vec<Vec<u8>> = sizes.iter().map(|&size| vec![1; size]).collect();
        black_box(blocks);
    }

    pub fn stay_few() {
        step();
        let before = count();
        for _ in 0..4 {
            step();
        }
        let after = count();
        // If the 139 MB of each step were given back, they would cost 35,000 faults of 4 KB, or 2,000 of 64 KB.
        assert!(after - before < 200, "{} page faults", after - before);
    }
}
