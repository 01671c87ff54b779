//! Containers show what they hold.

use super::{Fp8Module, Visitor};
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::rc::Rc;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

macro_rules! iterated {
    ($([$($generics:tt)*] $type:ty;)*) => {
        $(impl<$($generics)*> Fp8Module for $type {
            fn visit(&self, visitor: &mut dyn Visitor) {
                self.iter().for_each(|module| module.visit(visitor));
            }
        })*
    };
}

iterated! {
    [T: Fp8Module] [T];
    [T: Fp8Module, const N: usize] [T; N];
    [T: Fp8Module] Vec<T>;
    [T: Fp8Module] VecDeque<T>;
    [T: Fp8Module] Option<T>;
}

macro_rules! pointers {
    ($($type:ty),*) => {
        $(impl<T: Fp8Module + ?Sized> Fp8Module for $type {
            fn visit(&self, visitor: &mut dyn Visitor) {
                (**self).visit(visitor);
            }
        })*
    };
}

pointers!(&T, &mut T, Box<T>, Rc<T>, Arc<T>);

macro_rules! tuples {
    ($(($($name:ident $index:tt),+))*) => {
        $(impl<$($name: Fp8Module),+> Fp8Module for ($($name,)+) {
            fn visit(&self, visitor: &mut dyn Visitor) {
                $(self.$index.visit(visitor);)+
            }
        })*
    };
}

tuples! {
    (A 0)
    (A 0, B 1)
    (A 0, B 1, C 2)
    (A 0, B 1, C 2, D 3)
    (A 0, B 1, C 2, D 3, E 4)
    (A 0, B 1, C 2, D 3, E 4, F 5)
}

impl<K, V: Fp8Module> Fp8Module for BTreeMap<K, V> {
    fn visit(&self, visitor: &mut dyn Visitor) {
        self.values().for_each(|module| module.visit(visitor));
    }
}

/// In the order of the keys, so that a model is visited in the same order in every process.
impl<K: Ord, V: Fp8Module, S> Fp8Module for HashMap<K, V, S> {
    fn visit(&self, visitor: &mut dyn Visitor) {
        let mut entries: Vec<_> = self.iter().collect();
        entries.sort_by_key(|(key, _)| *key);
        entries.iter().for_each(|(_, module)| module.visit(visitor));
    }
}

impl<T: Fp8Module + ?Sized> Fp8Module for Mutex<T> {
    fn visit(&self, visitor: &mut dyn Visitor) {
        self.lock()
            .unwrap_or_else(PoisonError::into_inner)
            .visit(visitor);
    }
}

impl<T: Fp8Module + ?Sized> Fp8Module for RwLock<T> {
    fn visit(&self, visitor: &mut dyn Visitor) {
        self.read()
            .unwrap_or_else(PoisonError::into_inner)
            .visit(visitor);
    }
}

/// Shows nothing until the value is set.
impl<T: Fp8Module> Fp8Module for OnceLock<T> {
    fn visit(&self, visitor: &mut dyn Visitor) {
        self.get().visit(visitor);
    }
}

/// Panics while the cell is mutably borrowed, as `RefCell::borrow` does.
impl<T: Fp8Module + ?Sized> Fp8Module for RefCell<T> {
    fn visit(&self, visitor: &mut dyn Visitor) {
        self.borrow().visit(visitor);
    }
}
