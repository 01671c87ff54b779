//! Rewrites the syntax tree of a template: whatever may create or read much asks the [`Budget`] first.

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
        let times = times
            .as_usize()
            .ok_or_else(|| refused("a text or a list is multiplied with no whole number".into()))?;
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

fn alone() -> Error {
    refused("there is no other template that it could include, import or extend".into())
}

struct Guard {
    depth: usize,
}

impl Guard {
    /// One level further in.
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
        self.within(|to| to.guarded_stmt(stmt))
    }

    fn guarded_stmt<'a>(&mut self, stmt: &Stmt<'a>) -> Result<Stmt<'a>, Error> {
        let to = self;
        Ok(match stmt {
            Stmt::Template(x) => {
                let children = to.stmts(&x.children)?;
                Stmt::Template(Spanned::new(Template { children }, x.span()))
            }
            Stmt::EmitExpr(x) => {
                let expr = to.expr(&x.expr)?;
                Stmt::EmitExpr(Spanned::new(EmitExpr { expr }, x.span()))
            }
            // As an expression it passes through the formatter, which counts it.
            Stmt::EmitRaw(x) => {
                let value = Value::from_safe_string(x.raw.into());
                let expr = Expr::Const(Spanned::new(Const { value }, x.span()));
                Stmt::EmitExpr(Spanned::new(EmitExpr { expr }, x.span()))
            }
            Stmt::ForLoop(x) => {
                let node = ForLoop {
                    target: to.expr(&x.target)?,
                    iter: ask(INDEX, to.expr(&x.iter)?),
                    filter_expr: to.maybe(&x.filter_expr)?,
                    recursive: x.recursive,
                    body: to.stmts(&x.body)?,
                    else_body: to.stmts(&x.else_body)?,
                };
                Stmt::ForLoop(Spanned::new(node, x.span()))
            }
            Stmt::IfCond(x) => {
                let node = IfCond {
                    expr: to.expr(&x.expr)?,
                    true_body: to.stmts(&x.true_body)?,
                    false_body: to.stmts(&x.false_body)?,
                };
                Stmt::IfCond(Spanned::new(node, x.span()))
            }
            Stmt::WithBlock(x) => {
                let pairs = x.assignments.iter();
                let pairs = pairs.map(|(name, value)| {
                    Ok::<_, Error>((to.expr(name)?, ask(READ, to.expr(value)?)))
                });
                let assignments = pairs.collect::<Result<_, _>>()?;
                let body = to.stmts(&x.body)?;
                Stmt::WithBlock(Spanned::new(WithBlock { assignments, body }, x.span()))
            }
            Stmt::Set(x) => {
                let target = to.target(&x.target)?;
                let expr = ask(READ, to.expr(&x.expr)?);
                Stmt::Set(Spanned::new(Set { target, expr }, x.span()))
            }
            Stmt::SetBlock(x) => {
                let node = SetBlock {
                    target: to.target(&x.target)?,
                    filter: to.maybe(&x.filter)?,
                    body: to.stmts(&x.body)?,
                };
                Stmt::SetBlock(Spanned::new(node, x.span()))
            }
            Stmt::AutoEscape(x) => {
                let (enabled, body) = (to.expr(&x.enabled)?, to.stmts(&x.body)?);
                Stmt::AutoEscape(Spanned::new(AutoEscape { enabled, body }, x.span()))
            }
            Stmt::FilterBlock(x) => {
                let (filter, body) = (to.expr(&x.filter)?, to.stmts(&x.body)?);
                Stmt::FilterBlock(Spanned::new(FilterBlock { filter, body }, x.span()))
            }
            Stmt::Macro(x) => Stmt::Macro(to.macro_of(x)?),
            Stmt::CallBlock(x) => {
                let (call, macro_decl) = (to.call(&x.call)?, to.macro_of(&x.macro_decl)?);
                Stmt::CallBlock(Spanned::new(CallBlock { call, macro_decl }, x.span()))
            }
            Stmt::Block(_) | Stmt::Import(_) | Stmt::FromImport(_) => return Err(alone()),
            Stmt::Extends(_) | Stmt::Include(_) => return Err(alone()),
            Stmt::Continue(x) => Stmt::Continue(Spanned::new(Continue, x.span())),
            Stmt::Break(x) => Stmt::Break(Spanned::new(Break, x.span())),
            Stmt::Do(x) => {
                let call = to.call(&x.call)?;
                Stmt::Do(Spanned::new(Do { call }, x.span()))
            }
        })
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
                CallArg::Pos(x) => CallArg::Pos(ask(READ, self.expr(x)?)),
                CallArg::Kwarg(name, x) => CallArg::Kwarg(name, ask(READ, self.expr(x)?)),
                CallArg::PosSplat(x) => CallArg::PosSplat(ask(READ, self.expr(x)?)),
                CallArg::KwargSplat(x) => CallArg::KwargSplat(ask(READ, self.expr(x)?)),
            })
        });
        guarded.collect()
    }

    fn exprs<'a>(&mut self, exprs: &[Expr<'a>]) -> Result<Vec<Expr<'a>>, Error> {
        exprs.iter().map(|expr| self.expr(expr)).collect()
    }

    fn maybe<'a>(&mut self, expr: &Option<Expr<'a>>) -> Result<Option<Expr<'a>>, Error> {
        expr.as_ref().map(|expr| self.expr(expr)).transpose()
    }

    /// The target of an assignment or a call: a name, names, or an attribute, which must stay an attribute.
    fn target<'a>(&mut self, expr: &Expr<'a>) -> Result<Expr<'a>, Error> {
        match expr {
            Expr::GetAttr(x) => self.attribute(x),
            expr => self.expr(expr),
        }
    }

    fn attribute<'a>(&mut self, x: &Spanned<GetAttr<'a>>) -> Result<Expr<'a>, Error> {
        let node = GetAttr {
            expr: self.expr(&x.expr)?,
            name: x.name,
        };
        Ok(Expr::GetAttr(Spanned::new(node, x.span())))
    }

    fn expr<'a>(&mut self, expr: &Expr<'a>) -> Result<Expr<'a>, Error> {
        self.within(|to| to.guarded_expr(expr))
    }

    fn guarded_expr<'a>(&mut self, expr: &Expr<'a>) -> Result<Expr<'a>, Error> {
        let to = self;
        Ok(match expr {
            Expr::Var(x) => Expr::Var(Spanned::new(Var { id: x.id }, x.span())),
            Expr::Const(x) => {
                let value = x.value.clone();
                Expr::Const(Spanned::new(Const { value }, x.span()))
            }
            Expr::Slice(x) => {
                let node = Slice {
                    expr: ask(COPY, to.expr(&x.expr)?),
                    start: to.maybe(&x.start)?,
                    stop: to.maybe(&x.stop)?,
                    step: to.maybe(&x.step)?,
                };
                Expr::Slice(Spanned::new(node, x.span()))
            }
            Expr::UnaryOp(x) => {
                #[allow(clippy::needless_match, reason = "the type has no copies")]
                let op = match x.op {
                    UnaryOpKind::Not => UnaryOpKind::Not,
                    UnaryOpKind::Neg => UnaryOpKind::Neg,
                };
                let expr = to.expr(&x.expr)?;
                Expr::UnaryOp(Spanned::new(UnaryOp { op, expr }, x.span()))
            }
            Expr::BinOp(x) => {
                let (left, right) = (to.expr(&x.left)?, to.expr(&x.right)?);
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
            Expr::Compare(x) => {
                let others = x.ops.iter().map(|x| {
                    let expr = ask(READ, to.expr(&x.expr)?);
                    Ok::<_, Error>(CompareOp { op: x.op, expr })
                });
                let ops = others.collect::<Result<_, _>>()?;
                let expr = ask(READ, to.expr(&x.expr)?);
                Expr::Compare(Spanned::new(Compare { expr, ops }, x.span()))
            }
            Expr::IfExpr(x) => {
                let node = IfExpr {
                    test_expr: to.expr(&x.test_expr)?,
                    true_expr: to.expr(&x.true_expr)?,
                    false_expr: to.maybe(&x.false_expr)?,
                };
                Expr::IfExpr(Spanned::new(node, x.span()))
            }
            Expr::Filter(x) => {
                let node = Filter {
                    name: x.name,
                    expr: to.maybe(&x.expr)?.map(|expr| ask(READ, expr)),
                    args: to.args(&x.args)?,
                };
                ask(COPY, Expr::Filter(Spanned::new(node, x.span())))
            }
            Expr::Test(x) => {
                let node = Test {
                    name: x.name,
                    expr: ask(READ, to.expr(&x.expr)?),
                    args: to.args(&x.args)?,
                };
                Expr::Test(Spanned::new(node, x.span()))
            }
            Expr::GetAttr(x) => to.attribute(x)?,
            Expr::GetItem(x) => {
                let node = GetItem {
                    expr: ask(INDEX, to.expr(&x.expr)?),
                    subscript_expr: ask(KEY, to.expr(&x.subscript_expr)?),
                };
                Expr::GetItem(Spanned::new(node, x.span()))
            }
            Expr::Call(x) => Expr::Call(to.call(x)?),
            Expr::List(x) => {
                let items = to.exprs(&x.items)?;
                Expr::List(Spanned::new(List { items }, x.span()))
            }
            Expr::Tuple(x) => {
                let items = to.exprs(&x.items)?;
                Expr::Tuple(Spanned::new(Tuple { items }, x.span()))
            }
            Expr::Map(x) => {
                let keys = to.exprs(&x.keys)?;
                let keys = keys.into_iter().map(|key| ask(KEY, key)).collect();
                let values = to.exprs(&x.values)?;
                Expr::Map(Spanned::new(Map { keys, values }, x.span()))
            }
        })
    }
}
