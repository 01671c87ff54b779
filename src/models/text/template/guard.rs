//! Rewrites the syntax tree of a template: an operation that may create or read much first asks the [`Budget`].

use super::budget::{Budget, refused};
use minijinja::machinery::Span;
use minijinja::machinery::ast::{
    AutoEscape, BinOp, BinOpKind, Break, Call, CallArg, CallBlock, Compare, CompareOp, Const,
    Continue, Do, EmitExpr, Expr, Filter, FilterBlock, ForLoop, GetAttr, GetItem, IfCond, IfExpr,
    List, Macro, Map, Set, SetBlock, Slice, Spanned, Stmt, Template, Test, Tuple, UnaryOp,
    UnaryOpKind, Var, WithBlock,
};
use minijinja::value::{Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, Value};

/// Nesting of statements and expressions. The engine's own bound misses some kinds.
const MAX_DEPTH: usize = 500;

/// Functions that return their argument or fail. No template can name them.
const READ: &str = "#read";
const MAKE: &str = "#make";
const COPY: &str = "#copy";
const INDEX: &str = "#index";
const KEY: &str = "#key";
const MULTIPLY: &str = "#multiply";

/// Registers the functions that the rewritten tree calls.
pub(super) fn add(jinja: &mut Environment<'_>, budget: &Budget) {
    let guard = |check: fn(&Budget, &Value) -> Result<(), Error>| {
        let budget = budget.clone();
        // Undefined values and keyword arguments pass through as they are.
        Value::from_function(move |args: Rest<ValueOrKwargs>| {
            let value = args.into_values().pop().unwrap_or_default();
            check(&budget, &value).map(|()| value)
        })
    };
    jinja.add_global(READ, guard(|budget, value| budget.size(value).map(|_| ())));
    jinja.add_global(
        MAKE,
        guard(|budget, value| budget.make(budget.size(value)?)),
    );
    jinja.add_global(
        COPY,
        guard(|budget, value| budget.make(budget.shallow(value)?)),
    );
    // A lazy sequence is computed up to the requested element.
    let index = |budget: &Budget, value: &Value| match value.kind() {
        ValueKind::Iterable => budget.shallow(value).map(|_| ()),
        _ => Ok(()),
    };
    jinja.add_global(INDEX, guard(index));
    jinja.add_global(KEY, guard(|_, value| key(value)));
    let budget = budget.clone();
    jinja.add_function(MULTIPLY, move |a: Value, b: Value| {
        multiply(&budget, &a, &b)
    });
}

/// Rejects lists as keys: comparing keys would traverse them.
fn key(key: &Value) -> Result<(), Error> {
    match key.kind() {
        ValueKind::Seq | ValueKind::Map | ValueKind::Iterable => {
            Err(refused(format!("a key is a {}", key.kind())))
        }
        _ => Ok(()),
    }
}

/// Replaces the engine's multiplication, which creates strings of 100 MB while compiling.
fn multiply(budget: &Budget, a: &Value, b: &Value) -> Result<Value, Error> {
    let repeated = |x: &Value| matches!(x.kind(), ValueKind::String | ValueKind::Seq);
    let (value, times) = if repeated(a) { (a, b) } else { (b, a) };
    if repeated(value) {
        let times = times.as_usize().ok_or_else(|| {
            refused("a text or a list is multiplied by something other than a whole number".into())
        })?;
        budget.make(budget.shallow(value)?.saturating_mul(times as u64))?;
        if let Some(text) = value.as_str() {
            return Ok(Value::from(text.repeat(times)));
        }
        let elements: Vec<Value> = value.try_iter()?.collect();
        let count = elements.len().saturating_mul(times);
        let all = elements.into_iter().cycle().take(count);
        return Ok(Value::from(all.collect::<Vec<_>>()));
    }
    if let (true, true) = (a.is_integer(), b.is_integer()) {
        let product = i128::try_from(a.clone())?.checked_mul(i128::try_from(b.clone())?);
        return product
            .map(Value::from)
            .ok_or_else(|| refused("a product of whole numbers is too large".into()));
    }
    Ok(Value::from(
        f64::try_from(a.clone())? * f64::try_from(b.clone())?,
    ))
}

/// The rewritten tree.
pub(super) fn guarded<'a>(tree: &Stmt<'a>) -> Result<Stmt<'a>, Error> {
    Guard { depth: 0 }.stmt(tree)
}

/// A call of one of the functions above.
fn call<'a>(function: &'static str, args: Vec<Expr<'a>>, span: Span) -> Expr<'a> {
    let expr = Expr::Var(Spanned::new(Var { id: function }, span));
    let args = args.into_iter().map(CallArg::Pos).collect();
    Expr::Call(Spanned::new(Call { expr, args }, span))
}

fn ask<'a>(function: &'static str, expr: Expr<'a>) -> Expr<'a> {
    // Constants of the source are short.
    if let (READ, Expr::Const(_)) = (function, &expr) {
        return expr;
    }
    let span = expr.span();
    call(function, vec![expr], span)
}

struct Guard {
    depth: usize,
}

/// A `match` over a tree's nodes: for each kind of node, the method of [`Guard`] that rewrites each field.
macro_rules! rewritten {
    ($guard:ident, $node:ident: $kind:ident {
        $($name:ident { $($field:ident: $method:ident),* })*
    } $($others:tt)*) => {
        match $node {
            $($kind::$name(x) => {
                let node = $name { $($field: $guard.$method(&x.$field)?),* };
                $kind::$name(Spanned::new(node, x.span()))
            })*
            $($others)*
        }
    };
}

impl Guard {
    /// Runs `make` one level deeper.
    fn within<T>(&mut self, make: impl FnOnce(&mut Self) -> Result<T, Error>) -> Result<T, Error> {
        if self.depth == MAX_DEPTH {
            return Err(refused(format!(
                "the template nests more than {MAX_DEPTH} levels"
            )));
        }
        self.depth += 1;
        let made = make(self);
        self.depth -= 1;
        made
    }

    fn stmts<'a>(&mut self, stmts: &[Stmt<'a>]) -> Result<Vec<Stmt<'a>>, Error> {
        stmts.iter().map(|stmt| self.stmt(stmt)).collect()
    }

    fn stmt<'a>(&mut self, stmt: &Stmt<'a>) -> Result<Stmt<'a>, Error> {
        self.within(|guard| guard.guarded_stmt(stmt))
    }

    fn guarded_stmt<'a>(&mut self, stmt: &Stmt<'a>) -> Result<Stmt<'a>, Error> {
        Ok(rewritten!(self, stmt: Stmt {
            Template { children: stmts }
            EmitExpr { expr: expr }
            ForLoop { target: expr, iter: index, filter_expr: maybe, recursive: same, body: stmts, else_body: stmts }
            IfCond { expr: expr, true_body: stmts, false_body: stmts }
            WithBlock { assignments: assignments, body: stmts }
            Set { target: target, expr: read }
            SetBlock { target: target, filter: maybe, body: stmts }
            AutoEscape { enabled: expr, body: stmts }
            FilterBlock { filter: expr, body: stmts }
            CallBlock { call: call, macro_decl: macro_of }
            Continue {}
            Break {}
            Do { call: call }
        }
            // As an expression it passes through the formatter, which counts it.
            Stmt::EmitRaw(x) => {
                let value = Value::from_safe_string(x.raw.into());
                let expr = Expr::Const(Spanned::new(Const { value }, x.span()));
                Stmt::EmitExpr(Spanned::new(EmitExpr { expr }, x.span()))
            }
            Stmt::Macro(x) => Stmt::Macro(self.macro_of(x)?),
            Stmt::Block(_) | Stmt::Import(_) | Stmt::FromImport(_) | Stmt::Extends(_) | Stmt::Include(_) => {
                let reason = "there is no other template that it could include, import or extend";
                return Err(refused(reason.into()));
            }
        ))
    }

    fn macro_of<'a>(&mut self, x: &Spanned<Macro<'a>>) -> Result<Spanned<Macro<'a>>, Error> {
        let node = Macro {
            name: x.name,
            args: self.exprs(&x.args)?,
            defaults: self.exprs(&x.defaults)?,
            body: self.stmts(&x.body)?,
        };
        Ok(Spanned::new(node, x.span()))
    }

    fn call<'a>(&mut self, x: &Spanned<Call<'a>>) -> Result<Spanned<Call<'a>>, Error> {
        let (expr, args) = (self.target(&x.expr)?, self.args(&x.args)?);
        Ok(Spanned::new(Call { expr, args }, x.span()))
    }

    /// Arguments, each checked first: filters, tests and methods traverse them.
    fn args<'a>(&mut self, args: &[CallArg<'a>]) -> Result<Vec<CallArg<'a>>, Error> {
        let guarded = args.iter().map(|arg| {
            Ok(match arg {
                CallArg::Pos(x) => CallArg::Pos(self.read(x)?),
                CallArg::Kwarg(name, x) => CallArg::Kwarg(name, self.read(x)?),
                CallArg::PosSplat(x) => CallArg::PosSplat(self.read(x)?),
                CallArg::KwargSplat(x) => CallArg::KwargSplat(self.read(x)?),
            })
        });
        guarded.collect()
    }

    fn assignments<'a>(
        &mut self,
        pairs: &[(Expr<'a>, Expr<'a>)],
    ) -> Result<Vec<(Expr<'a>, Expr<'a>)>, Error> {
        let guarded = pairs
            .iter()
            .map(|(name, value)| Ok((self.expr(name)?, self.read(value)?)));
        guarded.collect()
    }

    fn same<T: Clone>(&mut self, value: &T) -> Result<T, Error> {
        Ok(value.clone())
    }

    fn exprs<'a>(&mut self, exprs: &[Expr<'a>]) -> Result<Vec<Expr<'a>>, Error> {
        exprs.iter().map(|expr| self.expr(expr)).collect()
    }

    fn maybe<'a>(&mut self, expr: &Option<Expr<'a>>) -> Result<Option<Expr<'a>>, Error> {
        expr.as_ref().map(|expr| self.expr(expr)).transpose()
    }

    fn maybe_read<'a>(&mut self, expr: &Option<Expr<'a>>) -> Result<Option<Expr<'a>>, Error> {
        expr.as_ref().map(|expr| self.read(expr)).transpose()
    }

    fn read<'a>(&mut self, expr: &Expr<'a>) -> Result<Expr<'a>, Error> {
        Ok(ask(READ, self.expr(expr)?))
    }

    fn copy<'a>(&mut self, expr: &Expr<'a>) -> Result<Expr<'a>, Error> {
        Ok(ask(COPY, self.expr(expr)?))
    }

    fn index<'a>(&mut self, expr: &Expr<'a>) -> Result<Expr<'a>, Error> {
        Ok(ask(INDEX, self.expr(expr)?))
    }

    fn key<'a>(&mut self, expr: &Expr<'a>) -> Result<Expr<'a>, Error> {
        Ok(ask(KEY, self.expr(expr)?))
    }

    fn keys<'a>(&mut self, keys: &[Expr<'a>]) -> Result<Vec<Expr<'a>>, Error> {
        keys.iter().map(|key| self.key(key)).collect()
    }

    fn compared<'a>(&mut self, ops: &[CompareOp<'a>]) -> Result<Vec<CompareOp<'a>>, Error> {
        let guarded = ops.iter().map(|x| {
            let expr = self.read(&x.expr)?;
            Ok(CompareOp { op: x.op, expr })
        });
        guarded.collect()
    }

    /// The target of an assignment or a call: a name, names, or an attribute, which must stay an attribute.
    fn target<'a>(&mut self, expr: &Expr<'a>) -> Result<Expr<'a>, Error> {
        match expr {
            Expr::GetAttr(_) => self.guarded_expr(expr),
            expr => self.expr(expr),
        }
    }

    fn expr<'a>(&mut self, expr: &Expr<'a>) -> Result<Expr<'a>, Error> {
        self.within(|guard| guard.guarded_expr(expr))
    }

    fn guarded_expr<'a>(&mut self, expr: &Expr<'a>) -> Result<Expr<'a>, Error> {
        Ok(rewritten!(self, expr: Expr {
            Var { id: same }
            Const { value: same }
            Slice { expr: copy, start: maybe, stop: maybe, step: maybe }
            UnaryOp { op: unary, expr: expr }
            IfExpr { test_expr: expr, true_expr: expr, false_expr: maybe }
            Compare { ops: compared, expr: read }
            Test { name: same, expr: read, args: args }
            GetAttr { expr: expr, name: same }
            GetItem { expr: index, subscript_expr: key }
            List { items: exprs }
            Tuple { items: exprs }
            Map { keys: keys, values: exprs }
        }
            Expr::BinOp(x) => {
                let (left, right) = (self.expr(&x.left)?, self.expr(&x.right)?);
                let (left, right) = match x.op {
                    BinOpKind::Mul => return Ok(call(MULTIPLY, vec![left, right], x.span())),
                    BinOpKind::Add => (ask(COPY, left), ask(COPY, right)),
                    BinOpKind::Concat => (ask(MAKE, left), ask(MAKE, right)),
                    // `and` and `or` pick an operand; the remaining operators take numbers only.
                    BinOpKind::ScAnd | BinOpKind::ScOr => (left, right),
                    _ => (ask(READ, left), ask(READ, right)),
                };
                let op = x.op;
                Expr::BinOp(Spanned::new(BinOp { op, left, right }, x.span()))
            }
            Expr::Filter(x) => {
                let node = Filter {
                    name: x.name,
                    expr: self.maybe_read(&x.expr)?,
                    args: self.args(&x.args)?,
                };
                ask(COPY, Expr::Filter(Spanned::new(node, x.span())))
            }
            Expr::Call(x) => Expr::Call(self.call(x)?),
        ))
    }

    #[allow(clippy::needless_match, reason = "the type is not Clone")]
    fn unary(&mut self, op: &UnaryOpKind) -> Result<UnaryOpKind, Error> {
        Ok(match op {
            UnaryOpKind::Not => UnaryOpKind::Not,
            UnaryOpKind::Neg => UnaryOpKind::Neg,
        })
    }
}
